"""A check in the first optimizer steps: do the loss and the metrics of the module divide by samples?"""

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from fractions import Fraction
from inspect import signature
from math import lcm
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import numpy as np
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric

from onecurve.data.batch import StepParts
from onecurve.errors import UserError
from onecurve.network.module_state import call_step, set_mode, without_log
from onecurve.network.object_state import are_equal
from onecurve.network.snapshot import unchanged
from onecurve.observe.steps import is_checked_step
from onecurve.patches.torch import is_compiled, tree_leaves
from onecurve.process.gather import collectives_replaced
from onecurve.random.random_functions import sample_random
from onecurve.random.seeding import seed_generators

_log = logging.getLogger(__name__)
# Relative, of weights on a CPU. A GPU may round convolutions to TF32, and half precision has fewer digits.
_TOLERANCES, _OTHER_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}, 1e-2
_WAY_OUT = (
    "Set bit_exact=true, with which each virtual rank has a pass of its own, of data.batch_size / virtual_ranks "
    "samples, or train undivided: on one device, with trainer.accumulate_grad_batches=1"
)
_NO_MEAN = (
    "%s is no %s over samples: of %d samples it is %.6g, and the %s of their halves %.6g. Log a metric of "
    "torchmetrics, a sum with reduce_fx='sum', or a mean with its number as batch_size, or set bit_exact=true"
)
_NO_WEIGHT = (
    "%s is a MeanMetric without weights, and so a mean over batches, of which each number of processes has other ones: "
    "give it weight=n at each update, the number of samples, or set bit_exact=true"
)
_UNCHECKED = "%s; if one does not, each number of processes is another run"
_DRAWS = 3  # of samples, after the first step
_REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": sum, "max": max, "min": min}  # of `self.log`, besides the mean
_LOSS = "the loss that training_step returns"  # beside the names of what it logs
_SLOPE = "its slope in a fixed direction of the weights"


class _Number(NamedTuple):
    """A number that a step computed of some samples."""

    value: float
    weight: int  # in a mean
    reduction: str
    size: float  # to which a difference is relative


class _Pass(NamedTuple):
    """What a step computed of some samples."""

    numbers: dict[str, _Number]  # the loss, its slope, and what was logged
    states: Any  # of NumPy's and Python's generators after it
    weights: dict[str, float]  # that it has added to each MeanMetric


class LossCheck(L.Callback):
    """Refuses a module that is another experiment on each number of processes or micro-batches.

    It compares the loss of some samples with the mean of those of their halves, in evaluation mode; and the slopes of
    these losses, since a hook may change gradients. (Those of FSDP and of compiled networks are not compared; those of
    others call the hooks of their weights.) It does the same with the numbers that `validation_step` logs for the first
    loader, and warns of one that is no mean over samples, nor the sum or extremum as which it is logged. Halves may
    agree by chance, such as those with as many samples of a class or of the same padded length, and so other samples
    follow. All ranks take the same ones, and so come to the same result. A module that takes weighted batches is not
    checked; nor is one that communicates itself, as by a contrastive loss over the samples of all ranks, or raises an
    error in evaluation mode, of which a warning tells; nor is a pipeline, which checks its losses itself.
    """

    is_always_due = False  # also if nothing is divided, as `doctor=true` checks
    result = "not checked: the module takes weighted batches, or optimizes manually"  # what came of it

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: Any = trainer.datamodule
        is_manual, is_weighted = not pl_module.automatic_optimization, getattr(pl_module, "takes_batch", False)
        is_divided = (data.division.is_divided or self.is_always_due) and data.parallel.num_microbatches == 1
        has_metrics = data.evaluates("val") and is_overridden("validation_step", pl_module)
        steps = ["training_step", "validation_step"] if has_metrics else ["training_step"]
        self._checked = [] if is_manual or is_weighted or not is_divided else steps
        if is_manual and not is_weighted and data.division.is_divided:
            _log.warning(_UNCHECKED, "not checked whether losses divide by samples: the module optimizes manually")
        self._steps = self._drawn = 0
        # Halves of n and n + 1 samples have no equal parts of one class; several loaders need equal halves.
        self._odd = 1 if data.has_one_size else 0
        self._unit = 1 if data.has_one_size else _unit_of(data.given["train"])
        self._warned = set[str]()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Check after the step, not within it: FSDP would go on with the weights that the check has gathered."""
        self._steps += 1
        if not is_checked_step(self._steps):
            return
        data: Any = trainer.datamodule
        count = max(1, int(data.layout.mean_samples_per_batch) // 2 // self._unit) * 2 * self._unit + self._odd
        for _draw in range(_DRAWS if self._steps == 1 else 1):
            for step in list(self._checked):
                self._check(trainer, step, count)
            self._drawn += count

    def _check(self, trainer: L.Trainer, step: str, count: int) -> None:
        module, data, is_training = trainer.lightning_module, trainer.datamodule, step == "training_step"
        passes = _passes(trainer, step, self._drawn, count)
        if isinstance(passes, str) and self._odd and is_training:
            self._odd, count = 0, count - 1  # a queue of embeddings takes batches that divide its length
            passes = _passes(trainer, step, self._drawn, count)
        if isinstance(passes, str):  # a step may not run in evaluation mode, communicate, or take a stream
            self._checked.remove(step)
            if is_training:
                self.result = f"not checked whether the loss divides by samples: {passes}"
                _log.warning(_UNCHECKED, self.result)
            return
        if is_training:
            _refuse_loss(module, passes, count)
            self.result = f"the loss of {count} samples is the mean of those of their halves"
        self._warn_of_others(module, passes, count)
        if not is_training or data.layout.is_uneven or not data.has_one_size:
            self._warn_of_batch_means(passes)

    def _warn_of_others(self, module: L.LightningModule, passes: list[_Pass], count: int) -> None:
        """Name what the step logs and is not that of the samples together."""
        *halves, whole = (each.numbers for each in passes)
        tolerance = max(_tolerance(module), _TOLERANCES[torch.float32])  # metrics may be float32
        rounded = 2 / count if tolerance == _OTHER_TOLERANCE else 0.0  # a class of some samples may be another
        for name in sorted(whole.keys() - self._warned - {_LOSS, _SLOPE}):
            kind = whole[name].reduction
            if _differs(passes, name, tolerance, rounded * (count if kind == "sum" else 1)):
                self._warned.add(name)
                numbers = (name, kind, count, whole[name].value, kind, _reduced([half[name] for half in halves]))
                _log.warning(_NO_MEAN, *numbers)

    def _warn_of_batch_means(self, passes: list[_Pass]) -> None:
        """Name the means to which a batch adds as much weight as each of its halves."""
        *halves, whole = (each.weights for each in passes)
        for name in sorted(whole.keys() - self._warned):
            if not np.isclose(whole[name], sum(half.get(name, 0.0) for half in halves), rtol=1e-3):
                self._warned.add(name)
                _log.warning(_NO_WEIGHT, name)


def _unit_of(loaders: Any) -> int:
    """Return the fewest samples of the first of several loaders that have whole samples of the others beside them.

    It is one if the check would otherwise need more samples than a batch has, or a `batch_sampler` hides the size.
    """
    sizes = [loader.batch_size or 1 for loader in tree_leaves(loaders)]
    unit = lcm(*(Fraction(size, sizes[0]).denominator for size in sizes))
    return unit if 2 * unit <= sizes[0] else 1


def _refuse_loss(module: L.LightningModule, passes: list[_Pass], count: int) -> None:
    """Raise a UserError if the loss or its gradient is not the mean of those of the halves."""
    *halves, whole = passes
    step = f"{type(module).__name__}.training_step"
    if not are_equal(whole.states, halves[0].states):
        problem = f"{step} draws numbers of NumPy or Python for each sample, and each process would draw its own"
    elif _differs(passes, _LOSS, _tolerance(module)):
        mean = _reduced([half.numbers[_LOSS] for half in halves])
        problem = (
            f"{step} does not divide by samples: the loss of {count} samples is {whole.numbers[_LOSS].value:.6g}, and "
            f"the mean of those of their halves {mean:.6g}, as with class weights, padding without a mask, or a loss "
            "that compares samples"
        )
    elif _differs(passes, _SLOPE, _tolerance(module)):
        problem = (
            f"the gradient of {step} does not divide by samples, although its loss does: a hook clips or normalizes "
            "it, or a backward pass compares samples; clip in configure_gradient_clipping"
        )
    else:
        return
    raise UserError(f"{problem}, so each number of processes is another experiment. {_WAY_OUT}")


def _differs(passes: list[_Pass], name: str, tolerance: float, rounded: float = 0.0) -> bool:
    """Compare a number with that of the halves, up to a relative tolerance and what may be `rounded` besides."""
    found = [each.numbers[name] for each in passes if name in each.numbers]
    sizes = [number.size for number in found]
    if len(found) < len(passes) or not np.isfinite(sizes).all():  # such as the mean of a class that a half has not
        return False
    *halves, whole = found
    return abs(_reduced(halves) - whole.value) > tolerance * max(*sizes, 0.1) + rounded


def _reduced(numbers: list[_Number]) -> float:
    """Return the mean, sum or extremum of the numbers of several passes."""
    values, weights = [number.value for number in numbers], [number.weight for number in numbers]
    if numbers[0].reduction != "mean":
        return float(_REDUCTIONS[numbers[0].reduction](values))
    return float(np.average(values, weights=weights)) if any(weights) else np.nan


def _tolerance(module: L.LightningModule) -> float:
    """Return the tolerance of the least precise weights: a head in bfloat16 rounds what float32 layers compute."""
    kinds = {(weight.dtype, weight.is_cpu or weight.dtype is torch.float64) for weight in module.parameters()}
    return max(
        _TOLERANCES.get(dtype, _OTHER_TOLERANCE) if is_precise else _OTHER_TOLERANCE for dtype, is_precise in kinds
    )


def _passes(trainer: Any, step: str, first: int, count: int) -> list[_Pass] | str:
    """Compute the passes of both halves of `count` samples, and of all of them, without a trace in the run.

    Each begins with the same module, of which a step may update an average of weights or a schedule.
    Every rank must call it. If a pass of any rank raises an error, all get the text of an error in place of the passes.
    """
    middle, last = first + count // 2, first + count
    spans = [(first, middle), (middle, last), (first, last)]
    passes, problem = list[_Pass](), "another rank could not"
    try:
        with _as_before(trainer, trainer.lightning_module) as restore:
            sample_random.end()  # that of the step is not over, and a dataset may draw by `torch.randn_like`
            batches = trainer.datamodule.example_batches(spans, evaluates=step == "validation_step")
            for batch, (start, end) in zip(batches, spans, strict=True):
                restore()
                passes.append(_pass(trainer, step, batch, end - start))
    except Exception as error:
        passes, problem = [], str(error) or type(error).__name__
    return passes if trainer.strategy.reduce_boolean_decision(len(passes) == len(spans)) else problem


def _pass(trainer: Any, step: str, batch: StepParts, samples: int) -> _Pass:
    data, module, plugin = trainer.datamodule, trainer.lightning_module, trainer.precision_plugin
    batch = data.on_before_batch_transfer(plugin.convert_input(batch), 0)
    batch = data.on_after_batch_transfer(data.transfer_batch_to_device(batch, module.device, 0), 0)
    seed_generators(0, module.device.type)
    indices = data.sample_index
    sample_random.begin(lambda: indices, module.device, is_divided=False)
    module.log.reset_mock()
    before = _weights_of_means(module)
    several = step == "validation_step" and len(trainer.num_val_batches) > 1
    # The type of new tensors is that of the step. Autocast would round, and halves would differ from the whole.
    with nullcontext() if isinstance(plugin, MixedPrecision) else plugin.forward_context(), _gradients(module, step):
        output = call_step(module, step, batch, 0, *([0] if several else []))
    numbers = dict(_logged_numbers(module.log.call_args_list, samples))
    states = [random.getstate(), np.random.get_state()]
    if step == "training_step":
        loss = output["loss"] if isinstance(output, Mapping) else output
        numbers[_LOSS] = _Number(float(loss.detach()), samples, "mean", size=abs(float(loss.detach())))
        with suppress(RuntimeError):  # of a loss without gradients, or a recomputation that works in `backward` only
            numbers[_SLOPE] = _slope(loss, module, samples)
    weights = {name: weight - before.get(name, 0.0) for name, weight in _weights_of_means(module).items()}
    return _Pass(numbers, states, weights)


def _weights_of_means(module: L.LightningModule) -> dict[str, float]:
    """Return the sum of the weights of each MeanMetric of the module by name."""
    return {name: float(one.weight.sum()) for name, one in module.named_modules() if isinstance(one, MeanMetric)}


def _gradients(module: L.LightningModule, step: str) -> Any:
    """Return a context with gradients, if the step has them, and they neither compile code nor gather weights."""
    is_sharded = any(isinstance(weight, DTensor) for weight in module.parameters())
    return torch.set_grad_enabled(step == "training_step" and not is_sharded and not is_compiled(module))


def _slope(loss: Tensor, module: L.LightningModule, samples: int) -> _Number:
    """Return the slope of a loss in a random direction of the weights, always the same one."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    seed_generators(0, module.device.type)
    slope = square = 0.0
    for weight, gradient in zip(weights, gradients, strict=True):
        direction = torch.randn(weight.shape, device=weight.device)
        if gradient is not None:
            gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))  # its square may be tiny
            slope += float((gradient * direction).sum())
            square += float(gradient.square().sum())
    return _Number(slope, samples, "mean", size=10 * max(square**0.5, 1.0))


def _logged_numbers(calls: list[Any], samples: int) -> Iterator[tuple[str, _Number]]:
    """Yield the numbers that Lightning reduces, each with its weight in a mean; a metric has sums of its own."""
    for call in calls:
        arguments = signature(L.LightningModule.log).bind(None, *call.args, **call.kwargs).arguments
        value, reduction = arguments["value"], arguments.get("reduce_fx", "mean")
        kind = getattr(reduction, "__name__", reduction)  # of a function of torch, or its name
        if isinstance(value, float | int | Tensor) and (kind == "mean" or kind in _REDUCTIONS):
            size, number = arguments.get("batch_size"), float(torch.as_tensor(value).detach())
            weight = samples if size is None else int(size)
            yield arguments["name"], _Number(number, weight, kind, size=abs(number))


@contextmanager
def _as_before(trainer: Any, module: L.LightningModule) -> Iterator[Callable[[], None]]:
    """Undo what the check does: to the generators, the samples of the step, and the module.

    The value of the context is a function that restores the module in between.
    """
    data, parts = trainer.datamodule, trainer.datamodule.parts
    refuse = mock.Mock(side_effect=RuntimeError("it communicates between ranks"))
    with (
        isolate_rng(),
        torch.no_grad(),
        set_mode(module, training=False),
        without_log(module),  # first, as the module keeps it when it is restored
        unchanged(module.modules()) as restore,
        collectives_replaced(trainer.strategy, refuse),  # all ranks have the same samples here
        mock.patch.dict(vars(sample_random)),
    ):
        try:
            yield restore
        finally:
            data.parts = parts
            data.use_samples_of_hooks()
