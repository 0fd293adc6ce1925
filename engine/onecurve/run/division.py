"""A check after the first optimizer step: do the loss and the metrics of the module divide by samples?"""

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from onecurve.errors import UserError
from onecurve.network.module_state import set_mode, unchanged, without_log
from onecurve.random.random_functions import sample_random
from onecurve.random.seeding import are_equal, seed_generators

_log = logging.getLogger(__name__)
# Relative, of weights on a CPU. A GPU may round convolutions to TF32, and half precision has fewer digits.
_TOLERANCES, _OTHER_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}, 1e-2
_WAY_OUT = "Set bit_exact=true, with which each virtual rank has a pass of its own, or train undivided on one device"


class _Pass(NamedTuple):
    """What a step computed of some samples.

    Attributes:
        values: the loss, or what was logged, each with its weight in a mean.
        states: those of NumPy's and Python's generators after it.
    """

    values: dict[str, tuple[float, int]]
    states: Any


class DivisionCheck(L.Callback):
    """Refuses a module that is another experiment on each number of processes or micro-batches.

    It compares the loss of some samples with the mean of those of their halves, in evaluation mode and without
    gradients. It does the same with the numbers that `validation_step` logs for the first loader, and warns of one that
    is no mean over samples. All ranks take the same samples, and so come to the same result. A module that takes
    weighted batches, communicates itself or raises an error in evaluation mode is not checked; nor is a pipeline, which
    checks its losses itself.

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
        is_divided = (data.is_divided or self.is_always_due) and data.parallel.num_microbatches == 1
        if not (is_due and is_plain and is_divided):
            return
        count = max(2, int(data.layout.mean_samples_per_batch)) // 2 * 2
        # Halves of n and n + 1 samples have no equal parts of one class; several loaders need equal halves.
        count += 1 if data.has_one_size else 0
        try:
            whole, halves = _passes(trainer, "training_step", count)
        except Exception as error:  # the step of a module may not run in evaluation mode
            self.result = f"not checked whether the loss divides by samples: {error}"
            _log.info(self.result)
        else:
            _check_draws(pl_module, whole, halves[0])
            _check_loss(pl_module, whole, halves, count)
            self.result = f"the loss of {count} samples is the mean of those of their halves"
        if data.evaluates("val") and is_overridden("validation_step", pl_module):
            try:
                whole, halves = _passes(trainer, "validation_step", count)
            except Exception as error:  # it may communicate, or take a stream
                _log.debug("not checked whether the metrics of a validation divide by samples: %s", error)
            else:
                _warn_of_metrics(pl_module, whole, halves, count)


def _check_draws(module: L.LightningModule, whole: _Pass, half: _Pass) -> None:
    if not are_equal(whole.states, half.states):
        raise UserError(
            f"{type(module).__name__}.training_step draws numbers of NumPy or Python for each sample, and each process "
            f"or micro-batch would draw its own. {_WAY_OUT}"
        )


def _check_loss(module: L.LightningModule, whole: _Pass, halves: list[_Pass], count: int) -> None:
    loss, mean = whole.values["loss"][0], _mean(halves, "loss")
    if not _are_close(module, loss, mean):
        raise UserError(
            f"{type(module).__name__}.training_step does not divide by samples: the loss of {count} samples is "
            f"{loss:.6g}, and the mean of those of their halves {mean:.6g}, as with class weights or a loss "
            f"that compares samples. So each number of processes or micro-batches is another experiment. {_WAY_OUT}"
        )


def _warn_of_metrics(module: L.LightningModule, whole: _Pass, halves: list[_Pass], count: int) -> None:
    for name in sorted(whole.values.keys() & halves[0].values.keys() & halves[1].values.keys()):
        value, mean = whole.values[name][0], _mean(halves, name)
        if not _are_close(module, value, mean, rounded=2 / count):
            _log.warning(
                "%s is no mean over samples: of %d samples it is %.6g, and the mean of their halves %.6g. So it "
                "differs a little between numbers of processes: log a metric of torchmetrics, give `self.log` the "
                "number of what is averaged as its batch_size, or set bit_exact=true",
                *(name, count, value, mean),
            )


def _mean(passes: list[_Pass], name: str) -> float:
    weighted = [value * weight for value, weight in (each.values[name] for each in passes)]
    return sum(weighted) / sum(each.values[name][1] for each in passes)


def _are_close(module: L.LightningModule, value: float, mean: float, rounded: float = 0.0) -> bool:
    """Compare two numbers; `rounded` is what imprecise weights may change in the second one besides."""
    weight = next(module.parameters())
    if weight.is_cpu or weight.dtype is torch.float64:
        tolerance, rounded = _TOLERANCES.get(weight.dtype, _OTHER_TOLERANCE), 0.0
    else:
        tolerance = _OTHER_TOLERANCE
    return bool(np.isclose(mean, value, rtol=tolerance, atol=tolerance / 10 + rounded, equal_nan=True))


def _passes(trainer: Any, step: str, count: int) -> tuple[_Pass, list[_Pass]]:
    """Return the pass of the first samples, and those of their halves, without a trace in the run."""
    with _as_before(trainer, trainer.lightning_module):
        halves = [(0, count // 2), (count // 2, count)]
        return _pass(trainer, step, 0, count), [_pass(trainer, step, *half) for half in halves]


def _pass(trainer: Any, step: str, first: int, last: int) -> _Pass:
    """Compute a step of the module for the samples from `first` to `last` of the training or validation data."""
    data, module, plugin = trainer.datamodule, trainer.lightning_module, trainer.precision_plugin
    batch = data.example_batch(last - first, first, evaluates=step == "validation_step")
    batch = data.on_before_batch_transfer(plugin.convert_input(batch), 0)
    batch = data.on_after_batch_transfer(data.transfer_batch_to_device(batch, module.device, 0), 0)
    seed_generators(0, module.device.type)
    samples = data.sample_index
    sample_random.begin(lambda: samples, module.device, is_divided=False)
    module.log.reset_mock()
    several = step == "validation_step" and len(trainer.num_val_batches) > 1
    output = getattr(module, step)(batch, 0, *([0] if several else []))
    if step == "training_step":
        loss = output["loss"] if isinstance(output, Mapping) else output
        values = {"loss": (float(loss), last - first)}
    else:
        values = dict(_logged_means(module.log.call_args_list, last - first))
    return _Pass(values, [random.getstate(), np.random.get_state()])


def _logged_means(calls: list[Any], samples: int) -> Iterator[tuple[str, tuple[float, int]]]:
    """Yield the numbers of which Lightning makes a mean, each with its weight there; a metric has sums of its own."""
    for call in calls:
        arguments = signature(L.LightningModule.log).bind(None, *call.args, **call.kwargs).arguments
        value, is_mean = arguments["value"], arguments.get("reduce_fx", "mean") in ("mean", torch.mean)
        if isinstance(value, float | int | Tensor) and is_mean:
            yield arguments["name"], (float(value), arguments.get("batch_size") or samples)


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
