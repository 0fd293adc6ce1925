"""Patches that remove per-step work from Lightning's training loop that has no effect in this run.

No result changes. Each patch uses a hook that Lightning leaves open, or has a test in `tests/test_canaries.py` that
fails when Lightning changes. `docs/results.md` has the time that each one saves.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.utilities.model_helpers import is_overridden

_NOTHING = nullcontext()
_STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


class NullProfiler(PassThroughProfiler):
    """Profiler without effect: Lightning calls `profile` some forty times a step."""

    def profile(self, action_name: str) -> Any:
        return _NOTHING


def patch_trainer(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Remove work from the trainer's loop that costs time at every step and has no effect.

    Hooks that nobody overrides are set to None, which Lightning skips; assign them again to use them.
    """
    signals: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    signals.register_signal_handlers = _do_nothing  # src/callbacks/preemption.py has its own
    loop._broadcast_sigterm_tensor = _do_nothing  # asks at every step whether any rank received SIGTERM
    loop._build_kwargs = _CachedStepKwargs(loop._build_kwargs)
    loop._results, loop.val_loop._results = _Results(training=True), _Results(training=False)
    for hook in _STEP_HOOKS:  # Lightning skips a hook that is not callable
        for callback in trainer.callbacks:
            if not is_overridden(hook, callback, L.Callback) or _saves_only_at_epoch_end(hook, callback):
                setattr(callback, hook, None)
        if not is_overridden(hook, module, L.LightningModule):
            setattr(module, hook, None)


def _saves_only_at_epoch_end(hook: str, callback: L.Callback) -> bool:
    """Return whether the hook is ModelCheckpoint's check for a step or time interval, and neither is set."""
    if type(callback) is not ModelCheckpoint or hook != "on_train_batch_end":
        return False
    return not callback._every_n_train_steps and callback._train_time_interval is None


def _do_nothing(*_: Any) -> None:
    """Replace Lightning's signal handlers, which run collectives at any point, and its SIGTERM broadcast."""


class _Results(_ResultCollection):
    """Caches the step metrics until something is logged, and moves a result only if its device changes."""

    _cached_step_metrics: Any = None  # cleared when something is logged

    def __setitem__(self, name: str, result: _ResultMetric) -> None:
        super().__setitem__(name, result)
        result.to = partial(_move, result)  # type: ignore[method-assign]

    def log(self, *args: Any, **kwargs: Any) -> None:
        self._cached_step_metrics = None
        super().log(*args, **kwargs)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        self._cached_step_metrics = None
        super().reset(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self._cached_step_metrics = None
        return super().to(*args, **kwargs)

    def metrics(self, on_step: bool) -> Any:
        if not (on_step and self.training):
            return super().metrics(on_step)
        self._cached_step_metrics = self._cached_step_metrics or super().metrics(on_step)
        return self._cached_step_metrics


def _move(result: _ResultMetric, device: str | torch.device) -> _ResultMetric:
    """Move a logged result only if its value is on another device."""
    value = getattr(result, "value", None)  # unset before the first log() of a metric
    return result if value is not None and value.device == torch.device(device) else _ResultMetric.to(result, device)


class _CachedStepKwargs:
    """Caches the argument names of `training_step`, whose signature Lightning would inspect at every step."""

    def __init__(self, inspect: Callable[..., dict[str, Any]]) -> None:
        self._inspect = inspect
        self._names: list[str] = []

    def __call__(self, kwargs: dict[str, Any], batch: Any, batch_idx: int) -> dict[str, Any]:
        self._names = self._names or list(self._inspect(kwargs, batch, batch_idx))
        return dict(zip(self._names, (batch, batch_idx), strict=False))
