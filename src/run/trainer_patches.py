"""Patches that remove per-step work of Lightning 2.6's training loop that has no effect in this run.

No result changes. Each function is one patch: it names Lightning's lines, relative to
https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/, and the time that a step saves.
`docs/benchmarks/trainer-patches.md` has the measurement. Each patch uses a hook that Lightning leaves open, or has a
test in `tests/test_canaries.py` that fails when Lightning changes.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.utilities.model_helpers import is_overridden

_STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


def patch_trainer(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Apply all patches to a trainer and the module that it will train."""
    leave_signals_to_callback(trainer)
    remove_profiler_contexts(trainer)
    cache_logged_results(trainer)
    skip_empty_hooks(trainer, module)


def leave_signals_to_callback(trainer: L.Trainer) -> None:
    """Remove Lightning's signal handlers, and its broadcast at every step of whether a rank received SIGTERM.

    The handler broadcasts wherever the signal interrupts the process, so ranks could wait for each other forever. To
    replace it in `on_train_start` would be too late: it is active in the barrier and the sanity check before.
    `src/callbacks/preemption.py` handles signals. Upstream: trainer/connectors/signal_connector.py, lines 45 and 108;
    loops/training_epoch_loop.py, lines 259 and 300. This saves one broadcast per step of several ranks.
    """
    signals: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    signals.register_signal_handlers = _do_nothing
    loop._broadcast_sigterm_tensor = _do_nothing


def remove_profiler_contexts(trainer: L.Trainer) -> None:
    """Replace the profiler, unless one is configured, with one that makes no context managers.

    Upstream: profilers/profiler.py, line 57, a generator; it is entered some forty times per step.
    """
    if type(trainer.profiler) is PassThroughProfiler:
        trainer.profiler = NullProfiler()


def cache_logged_results(trainer: L.Trainer) -> None:
    """Collect the logged metrics when they are logged, and not again at every later step.

    Upstream: trainer/connectors/logger_connector/result.py, line 412 (moves each logged value, by a walk through the
    attributes of its metric) and the method `metrics`.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop._results = CachedResults(training=True)
    for evaluation in (loop.val_loop, trainer.validate_loop, trainer.test_loop):
        evaluation._results = CachedResults(training=False)


def skip_empty_hooks(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Set the hooks of a step that no class overrides to None, which Lightning does not call.

    Upstream: trainer/call.py, lines 170 and 226. To use such a hook later, assign it again.
    """
    for hook in _STEP_HOOKS:
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
    """Replace a method of Lightning."""


class NullProfiler(PassThroughProfiler):
    """Profiler without effect."""

    _context = nullcontext()

    def profile(self, action_name: str) -> Any:
        return self._context


class CachedResults(_ResultCollection):
    """Keeps the collected metrics until a value is logged, and moves a result only if its device changes.

    It counts samples as floats. Lightning averages the number of samples over the ranks as an integer, which rounds it
    down: upstream, fabric/utilities/distributed.py, `_sync_ddp`.
    """

    _cached_step_metrics: Any = None  # None after a value is logged

    def __setitem__(self, name: str, result: _ResultMetric) -> None:
        super().__setitem__(name, result)
        if "cumulated_batch_size" in result._defaults:
            result._defaults["cumulated_batch_size"] = torch.tensor(0.0)
            result.cumulated_batch_size = result.cumulated_batch_size.float()
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
    if value is not None and value.device == torch.device(device):
        return result
    return _ResultMetric.to(result, device)
