"""Lightning's loop without what it does at every step for nobody: a small step costs hardly more than by hand.

Nothing here changes what is computed. Each place is one that Lightning leaves open, or has a test in
`tests/test_canaries.py` that says when it moved; what each is worth stands in `docs/results.md`.
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
    """No profiler, and none asked some forty times a step whether it is one."""

    def profile(self, action_name: str) -> Any:
        return _NOTHING


def patch_trainer(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Take out of the trainer's loop what costs time at every step and does nothing.

    An empty hook is None from then on, and may be assigned anew.
    """
    signals: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    signals.register_signal_handlers = _do_nothing  # src/callbacks/preemption.py has its own
    loop._broadcast_sigterm_tensor = _do_nothing  # by which all ranks ask each other whether one got SIGTERM
    loop._build_kwargs = _StepArguments(loop._build_kwargs)
    loop._results, loop.val_loop._results = _Results(training=True), _Results(training=False)
    for hook in _STEP_HOOKS:  # what cannot be called is not
        for callback in trainer.callbacks:
            if not is_overridden(hook, callback, L.Callback) or _waits_for_an_epoch(hook, callback):
                setattr(callback, hook, None)
        if not is_overridden(hook, module, L.LightningModule):
            setattr(module, hook, None)


def _waits_for_an_epoch(hook: str, callback: L.Callback) -> bool:
    """A ModelCheckpoint that saves at no step and after no time, but looks at the end of each whether it does."""
    if type(callback) is not ModelCheckpoint or hook != "on_train_batch_end":
        return False
    return not callback._every_n_train_steps and callback._train_time_interval is None


def _do_nothing(*_: Any) -> None:
    """In place of what runs a collective wherever a signal finds the process, or at every step."""


class _Results(_ResultCollection):
    """What is logged: gathered once, where Lightning does so at every step, and moved only to another device."""

    _of_step: Any = None  # as gathered since something was logged last

    def __setitem__(self, name: str, result: _ResultMetric) -> None:
        super().__setitem__(name, result)
        result.to = partial(_move, result)  # type: ignore[method-assign]

    def log(self, *args: Any, **kwargs: Any) -> None:
        self._of_step = None
        super().log(*args, **kwargs)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        self._of_step = None
        super().reset(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self._of_step = None
        return super().to(*args, **kwargs)

    def metrics(self, on_step: bool) -> Any:
        if not (on_step and self.training):
            return super().metrics(on_step)
        self._of_step = self._of_step or super().metrics(on_step)
        return self._of_step


def _move(result: _ResultMetric, device: str | torch.device) -> _ResultMetric:
    """Where its value lies, all lies that is used again."""
    value = getattr(result, "value", None)  # none before a metric is first logged
    return result if value is not None and value.device == torch.device(device) else _ResultMetric.to(result, device)


class _StepArguments:
    """Of `training_step`, whose signature Lightning inspects at every step; once is enough."""

    def __init__(self, inspect: Callable[..., dict[str, Any]]) -> None:
        self._inspect = inspect
        self._names: list[str] = []

    def __call__(self, kwargs: dict[str, Any], batch: Any, batch_idx: int) -> dict[str, Any]:
        self._names = self._names or list(self._inspect(kwargs, batch, batch_idx))
        return dict(zip(self._names, (batch, batch_idx), strict=False))
