"""The arguments of `onecurve.Trainer`: what is refused, and callbacks and loggers in their various forms."""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.plugins import CheckpointIO

from onecurve.errors import UserError
from onecurve.network.precision import scales_loss

_BETTER = {"loss": "min", "acc": "max", "accuracy": "max"}  # by the last word of a metric
_log = logging.getLogger(__name__)
# What has no meaning here, or is given to Lightning already; its own defaults may stand in a script.
REFUSED = {
    "use_distributed_sampler": True,
    "enable_autolog_hparams": True,
    "overfit_batches": 0.0,
    "fast_dev_run": False,
    "barebones": False,
}
_INSTEAD = {
    "fast_dev_run": "set max_epochs, limit_train_batches, limit_val_batches and limit_test_batches to 1",
    "overfit_batches": "train on a Subset with the samples of so many batches",
}

_BY_MEMORY = (
    "BatchSizeFinder would choose the experiment by the memory of a device, as would Tuner.scale_batch_size: leave it "
    "out, set data.batch_size, and trainer.accumulate_grad_batches if it does not fit"
)


def check_arguments(seed: Any, virtual_ranks: Any, bit_exact: Any, kwargs: dict[str, Any]) -> None:
    """Raise a UserError for invalid arguments; remove those that have Lightning's default and are given elsewhere."""
    if not isinstance(seed, int) or not 0 <= seed < 2**32:  # as NumPy takes it
        raise UserError(f"seed={seed} is not a seed: give an integer of at least zero, and below 2 ** 32")
    if not isinstance(virtual_ranks, int) or virtual_ranks < 1:
        raise UserError(f"virtual_ranks={virtual_ranks}: give an integer of at least one")
    if not isinstance(bit_exact, bool):
        raise UserError(f"bit_exact={bit_exact}: give true or false")
    for name, default in REFUSED.items():
        if (value := kwargs.pop(name, default)) != default:
            raise UserError(f"Trainer({name}={value}) has no meaning here: {_INSTEAD.get(name, 'leave it out')}")
    for name, value in os.environ.items():
        if name.startswith("PL_TRAINER_") and value:  # Lightning would take it, past what the run records and divides
            argument = name.removeprefix("PL_TRAINER_").lower()
            raise UserError(f"{name}={value} is no option of a run here: unset it, and give {argument} to the trainer")
    for plugin in as_list(kwargs.get("plugins")):
        if isinstance(plugin, CheckpointIO):
            kind = type(plugin).__name__
            raise UserError(f"plugins={kind}(): the trainer writes each checkpoint itself, at once: leave it out")
    every = kwargs.get("log_every_n_steps")
    if every is not None and every < 1:
        raise UserError(f"trainer.log_every_n_steps={every} logs nothing and detects no NaN: set at least 1")
    for name in ("check_val_every_n_epoch", "val_check_interval"):
        if kwargs.get(name) == 0:
            raise UserError(f"trainer.{name}=0: give at least one; trainer.limit_val_batches=0 never validates")
    clip = kwargs.get("gradient_clip_val") or 0
    if not (isinstance(clip, int | float) and clip >= 0):  # Lightning would not clip to a negative norm
        raise UserError(f"trainer.gradient_clip_val={clip}: give a number above zero, or null")
    if not isinstance(kwargs.get("val_check_interval") or 1, int | float):
        # Lightning reads each rank's own clock, so some ranks would validate while others train.
        raise UserError(
            f"trainer.val_check_interval={kwargs['val_check_interval']}: give a number of steps, or a fraction of an "
            "epoch; ranks cannot validate by the clock"
        )


def check_is_local(option: str, folder: Any) -> None:
    """Raise a UserError for a URL, which would become the name of a local folder."""
    if "://" in str(folder):
        raise UserError(f"{option}={folder} is no folder of this machine: give one, and copy the files after the run")


def check_precision(precision: Any, accelerator: Any) -> None:
    """Raise a UserError for float16 on a CPU: Lightning would take bfloat16, as another experiment has it by name."""
    if isinstance(accelerator, CPUAccelerator) and scales_loss(precision):
        raise UserError(f"trainer.precision={precision} needs a GPU: take bf16-mixed")


def check_callbacks_are_possible(callbacks: dict[str, L.Callback]) -> None:
    """Raise a UserError for callbacks of Lightning that change the parts of a step or the experiment.

    A callback that takes the worst value of a metric for the best one is named in a warning.
    """
    for name, one in callbacks.items():
        if isinstance(one, ModelCheckpoint):
            check_is_local(f"{name}.dirpath", one.dirpath)
        if isinstance(one, EarlyStopping | ModelCheckpoint) and one.monitor:
            better = _BETTER.get(re.split(r"[/_.]", one.monitor)[-1], one.mode)
            if one.mode != better:
                problem = f"{name} monitors {one.monitor} with mode={one.mode}"
                _log.warning("%s: set mode=%s, if the worst is not wanted", problem, better)
    if has_kind(callbacks, GradientAccumulationScheduler):
        raise UserError(
            "GradientAccumulationScheduler changes the number of micro-batches while a run trains, each of which is a "
            "part of a step here: set trainer.accumulate_grad_batches, which changes no curve"
        )
    if has_kind(callbacks, BatchSizeFinder):
        raise UserError(_BY_MEMORY)


def check_search(trainer: Any) -> None:
    """Raise a UserError for a search, also of Lightning's `Tuner`, whose result depends on the hardware.

    Lightning calls the hook that searches before the hooks of this library, which divide and add the steps of a run.
    """
    if any(isinstance(one, BatchSizeFinder) for one in trainer.callbacks):
        raise UserError(_BY_MEMORY)
    is_divided = trainer.num_devices * trainer.num_nodes * trainer.accumulate > 1 or trainer.bit_exact
    if is_divided and any(isinstance(one, LearningRateFinder) for one in trainer.callbacks):
        raise UserError(
            "LearningRateFinder follows the loss of rank zero's samples, so each number of processes would train at "
            "another rate: search in a run of one process without bit_exact or accumulate_grad_batches, and give the "
            "module the rate that it finds"
        )


def named(callbacks: Any) -> dict[str, L.Callback]:
    """Return the callbacks by name; those of a list have the names of their classes."""
    if isinstance(callbacks, Mapping):
        return dict(callbacks)
    named: dict[str, L.Callback] = {}
    for one in as_list(callbacks):
        name = type(one).__name__
        named[f"{name}-{len(named)}" if name in named else name] = one
    return named


def has_kind(callbacks: dict[str, L.Callback], kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks.values())


def as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, Iterable) else [value]
