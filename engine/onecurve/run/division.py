"""A check after the first optimizer step: does the loss of the module divide by samples?"""

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from onecurve.errors import UserError
from onecurve.network.module_state import set_mode, unchanged, without_log
from onecurve.random.random_functions import sample_random
from onecurve.random.seeding import are_equal, seed_generators

_log = logging.getLogger(__name__)
# Relative, of weights on a CPU. A GPU may round convolutions to TF32, and half precision has fewer digits.
_TOLERANCES, _OTHER_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}, 1e-2
_WAY_OUT = "Set bit_exact=true, with which each virtual rank has a pass of its own, or train undivided on one device"


class _Loss(NamedTuple):
    """A loss, the number of its samples, and the states of NumPy's and Python's generators after it."""

    value: float
    samples: int
    states: Any


class DivisionCheck(L.Callback):
    """Refuses a module that is another experiment on each number of processes or micro-batches.

    It compares the loss of some samples with the mean of those of their halves, in evaluation mode and without
    gradients. All ranks take the same samples, and so come to the same result. A module that takes weighted batches,
    communicates itself or raises an error in evaluation mode is not checked; a pipeline checks its losses itself.

    Attributes:
        is_always_due: check also if nothing is divided, as `doctor=true` does.
        result: what came of it.
    """

    is_always_due = False
    result = "not checked: the module takes weighted batches, or optimizes manually"

    def __init__(self) -> None:
        self._is_due = True

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Check after the step, not within it: FSDP would go on with the weights that the check has gathered."""
        is_due, self._is_due = self._is_due, False
        data: Any = trainer.datamodule
        is_plain = pl_module.automatic_optimization and not getattr(pl_module, "takes_batch", False)
        is_divided = data.is_divided or self.is_always_due
        count = int(data.layout.mean_samples_per_batch) if is_due and is_plain and is_divided else 0
        if count < 2 or data.parallel.num_microbatches > 1:
            return
        with _as_before(trainer, pl_module):
            try:
                whole = _loss(trainer, 0, count)
                halves = [_loss(trainer, 0, count // 2), _loss(trainer, count // 2, count)]
            except Exception as error:  # the step of a module may not run in evaluation mode
                self.result = f"not checked whether the loss divides by samples: {error}"
                _log.info(self.result)
                return
        _check_draws(pl_module, whole, halves[0])
        _check_mean(pl_module, whole, halves)
        self.result = f"the loss of {count} samples is the mean of those of their halves"


def _check_draws(module: L.LightningModule, whole: _Loss, half: _Loss) -> None:
    if not are_equal(whole.states, half.states):
        raise UserError(
            f"{type(module).__name__}.training_step draws numbers of NumPy or Python for each sample, and each process "
            f"or micro-batch would draw its own. {_WAY_OUT}"
        )


def _check_mean(module: L.LightningModule, whole: _Loss, halves: list[_Loss]) -> None:
    mean = sum(half.value * half.samples for half in halves) / whole.samples
    weight = next(module.parameters())
    is_precise = weight.is_cpu or weight.dtype is torch.float64
    tolerance = _TOLERANCES.get(weight.dtype, _OTHER_TOLERANCE) if is_precise else _OTHER_TOLERANCE
    if not np.isclose(mean, whole.value, rtol=tolerance, atol=tolerance / 10, equal_nan=True):
        raise UserError(
            f"{type(module).__name__}.training_step does not divide by samples: the loss of {whole.samples} samples is "
            f"{whole.value:.6g}, and the mean of those of their halves {mean:.6g}, as with class weights or a loss "
            f"that compares samples. So each number of processes or micro-batches is another experiment. {_WAY_OUT}"
        )


def _loss(trainer: Any, first: int, last: int) -> _Loss:
    """Compute the loss of the first samples of the training data from `first` to `last`."""
    data, module, plugin = trainer.datamodule, trainer.lightning_module, trainer.precision_plugin
    batch = data.on_before_batch_transfer(plugin.convert_input(data.example_batch(last - first, first)), 0)
    batch = data.on_after_batch_transfer(data.transfer_batch_to_device(batch, module.device, 0), 0)
    seed_generators(0, module.device.type)
    samples = data.sample_index
    sample_random.begin(lambda: samples, module.device, is_divided=False)
    output = module.training_step(batch, 0)
    loss = output["loss"] if isinstance(output, Mapping) else output
    return _Loss(float(loss), last - first, [random.getstate(), np.random.get_state()])


@contextmanager
def _as_before(trainer: Any, module: L.LightningModule) -> Iterator[None]:
    """Undo what the check does: to the generators, the samples of the step, and the module."""
    data, random_before = trainer.datamodule, dict(vars(sample_random))
    parts = data.parts
    with ExitStack() as stack:
        for context in (isolate_rng(), torch.no_grad(), set_mode(module, training=False), unchanged(module.modules())):
            stack.enter_context(context)
        stack.enter_context(without_log(module))
        stack.enter_context(mock.patch.multiple(trainer.strategy, reduce=_communicates, all_gather=_communicates))
        try:
            yield
        finally:
            vars(sample_random).clear()
            vars(sample_random).update(random_before)
            data.parts = parts
            data.end_parts()


def _communicates(*_: Any, **__: Any) -> None:
    raise RuntimeError("it communicates between ranks")
