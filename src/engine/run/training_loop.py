"""Changes of Lightning's training loop: steps in parts, signals, log points, metrics that a checkpoint keeps.

The callbacks check monitored metrics, buffers that would depend on the hardware, and divergence.

`patch_trainer` names Lightning's lines, relative to
https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/. When Lightning changes,
`tests/engine/run/test_training_loop.py` or `tests/engine/test_canaries.py` fails.
"""

import logging
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from src.engine.determinism.sampler import validation_interval
from src.engine.determinism.seeding import are_equal
from src.engine.run.metrics import VirtualMetrics
from src.engine.run.parts import StepInParts
from src.engine.run.pass_log import PassLog
from src.engine.utils.errors import UserError
from src.engine.utils.steps import is_log_point, trained_steps
from src.engine.utils.tensors import to_local

_log = logging.getLogger(__name__)


def patch_trainer(trainer: L.Trainer, virtual: VirtualMetrics | None) -> None:
    """Patch the parts of a trainer that results depend on; `virtual` is that of a run with `bit_exact`."""
    signals: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    # Lightning's handler of signals broadcasts wherever the signal interrupts the process, so ranks could wait for each
    # other forever; and every step broadcasts whether a rank received SIGTERM. `src/engine/run/stopping.py` handles
    # signals. To replace the handler in `on_train_start` would be too late: it is active in the barrier and the sanity
    # check before. (trainer/connectors/signal_connector.py, lines 45 and 108; loops/training_epoch_loop.py, lines 259
    # and 300)
    signals.register_signal_handlers = _do_nothing
    loop._broadcast_sigterm_tensor = _do_nothing
    loop.automatic_optimization.__class__ = StepInParts
    loop._results = _Results(True, virtual)
    for evaluation in (loop.val_loop, trainer.validate_loop, trainer.test_loop):
        evaluation._results = _Results(False, virtual)
    trainer._logger_connector.__class__ = _LogPointConnector
    trainer._logger_connector.virtual = virtual


def _do_nothing(*_: Any) -> None:
    """Replace a method of Lightning."""


class _Results(_ResultCollection):
    """Counts the samples of a logged mean as floats, and names the reduction of a maximum or minimum.

    Lightning averages the counts over the ranks as integers, which rounds down, and declares a sum for torchmetrics,
    which `MetricStates` uses. (trainer/connectors/logger_connector/result.py, line 202;
    fabric/utilities/distributed.py, `_sync_ddp`)

    Args:
        training: whether these are the values of training.
        virtual: reduces the means of evaluation over virtual ranks. Then processes have the same values, and need not
            synchronize them.
    """

    def __init__(self, training: bool, virtual: VirtualMetrics | None) -> None:
        super().__init__(training)
        self.virtual = virtual
        self._pass_log: PassLog | None = None

    @contextmanager
    def divert(self, log: PassLog) -> Iterator[None]:
        """Let a `PassLog` get what is logged."""
        self._pass_log = log
        try:
            yield
        finally:
            self._pass_log = None

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        if self._pass_log is not None:
            self._pass_log.add(fx, name, value, options)
            return
        if self.virtual:
            _check_virtual(self.virtual, name, value, options, self.training)
        super().log(fx, name, value, **options | {"sync_dist": options["sync_dist"] and not self.virtual})

    @staticmethod
    def _get_cache(result: _ResultMetric, on_step: bool) -> Tensor | None:
        """Return a value; one of the progress bar stays on the CPU, or each reading would wait for the device."""
        if on_step and result.meta.prog_bar and isinstance(result._forward_cache, Tensor):
            result._forward_cache = result._forward_cache.cpu()
        return _ResultCollection._get_cache(result, on_step)

    def __setitem__(self, name: str, result: _ResultMetric) -> None:
        super().__setitem__(name, result)
        if result.is_tensor and result.meta.reduce_fx in (torch.max, torch.min):
            result._reductions["value"] = result.meta.reduce_fx
        if self.virtual and result.is_tensor and not self.training:
            self.virtual.add_mean(name, result)
        if "cumulated_batch_size" in result._defaults:
            result._defaults["cumulated_batch_size"] = torch.tensor(0.0)
            result.cumulated_batch_size = result.cumulated_batch_size.float()


def _check_virtual(virtual: VirtualMetrics, name: str, value: Any, options: dict[str, Any], is_training: bool) -> None:
    """Raise a UserError for a value that would depend on how many virtual ranks a process has."""
    if options["on_step"] and not is_training:
        raise UserError(
            f"bit_exact=true: {name} is logged for each batch of an evaluation, of which processes have different "
            "numbers: log it with on_step=False"
        )
    if virtual.is_in_pass or not (options["sync_dist"] and isinstance(value, Tensor) and dist.is_initialized()):
        return
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, float(value))
    if any(other != value and not math.isnan(other) for other in values):
        raise UserError(
            f"bit_exact=true: {name} is logged outside of a step of the module, and processes have different values, "
            "from the batches that each has seen: log it in the step, or as a metric of torchmetrics"
        )


class _LogPointConnector(_LoggerConnector):
    """Passes the metrics of the first and the last step to the loggers, not only those of each interval.

    It also ends the passes of virtual ranks before the metrics of an evaluation are computed, which no hook precedes.
    (trainer/connectors/logger_connector/logger_connector.py, line 51; loops/evaluation_loop.py, line 385)
    """

    virtual: VirtualMetrics | None

    @property
    def should_update_logs(self) -> bool:
        steps = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        return super().should_update_logs or (self.trainer.training and is_log_point(self.trainer, steps + 1))

    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        if self.virtual:
            self.virtual.leave()


class OptimizerSteps(L.Callback):
    """Converts the interval of validation, and makes up for steps of ReduceLROnPlateau.

    Lightning steps ReduceLROnPlateau after an epoch's checkpoint is saved, and not at all
    after the first epoch of a restart (`_FitLoop.on_advance_end` and `_TrainingEpochLoop._update_learning_rates` in
    loops/).
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        if stage == "fit" and data.evaluated_samples("val"):
            may_cross_epochs = trainer.check_val_every_n_epoch is None
            trainer.val_check_interval = validation_interval(
                trainer.val_check_interval, data.steps_per_epoch, may_cross_epochs
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.last_step = trainer.datamodule.total_steps  # `is_log_point` reads it

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the metric of ReduceLROnPlateau is new whenever it takes a step."""
        every = trainer.check_val_every_n_epoch or 1
        for config in _plateau_configs(trainer):
            if config.monitor.startswith("val") and config.frequency % every:
                raise UserError(
                    f"scheduler.frequency={config.frequency}, but validation is every {every} epochs "
                    f"(trainer.check_val_every_n_epoch): set scheduler.frequency={every}"
                )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        for config in _plateau_configs(trainer):
            is_due = config.scheduler.last_epoch < trainer.current_epoch // config.frequency
            if is_due and config.monitor in metrics:
                pl_module.lr_scheduler_step(config.scheduler, metrics[config.monitor])
            _check_equal_on_ranks(trainer, pl_module.device, config)


def _plateau_configs(trainer: L.Trainer) -> list[Any]:
    configs = trainer.lr_scheduler_configs
    return [config for config in configs if config.reduce_on_plateau and config.interval == "epoch"]


def _check_equal_on_ranks(trainer: L.Trainer, device: torch.device, config: Any) -> None:
    """Raise a UserError on all ranks if a scheduler has seen different metrics on them. Every rank must call it."""
    scheduler = config.scheduler
    state = torch.tensor([scheduler.best, scheduler.num_bad_epochs], device=device)
    states = trainer.strategy.all_gather(state).view(-1, len(state))
    if (states != states[0]).any():
        raise UserError(
            f"{config.monitor} and so the learning rate differ between the ranks: log it with sync_dist=True"
        )


class MonitorCheck(L.Callback):
    """Lets a sanity check show whether the monitored metrics exist, which Lightning asks after an epoch.

    Args:
        monitors: the metric of each callback that monitors one, by the option of the callback.
        after_validation: the options of those that act after a validation only, whatever they monitor.
    """

    def __init__(self, monitors: dict[str, str], after_validation: Collection[str]) -> None:
        self.monitors = {name: monitor for name, monitor in monitors.items() if monitor.startswith("val")}
        self._after_validation = sorted({*self.monitors, *after_validation})

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._after_validation and not trainer.datamodule.evaluated_samples("val"):
            _log.warning("the run has no validation, so %s cannot act", " and ".join(self._after_validation))
        if not {"val/loss", "val/acc"}.issuperset(self.monitors.values()):
            trainer.num_sanity_val_steps = trainer.num_sanity_val_steps or 1

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logged = trainer.callback_metrics
        for name, monitor in self.monitors.items():
            if logged and monitor not in logged:  # a module may log nothing in the sanity check
                raise UserError(
                    f"{name} monitors {monitor}, which validation does not log (it logs {', '.join(logged)}): "
                    f"set its `monitor` to one of these, or {name}=null"
                )


class BufferCheck(L.Callback):
    """Refuses a network that updates a buffer or a frozen weight from the samples of one rank, or for each micro-batch.

    It compares them before and after the first backward pass of a run. `src/engine/parallel/batch_norm.py` takes
    care of batch normalization.
    """

    def __init__(self) -> None:
        self._before: dict[str, Tensor] | None = None
        self._is_due = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave a network alone that has no buffers, before a pipeline's ranks have different ones."""
        self._is_due = stage == "fit" and bool(_buffers(trainer, pl_module))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due and self._before is None:
            self._before = {name: buffer.clone() for name, buffer in _buffers(trainer, pl_module).items()}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if not self._is_due:
            return
        self._is_due, before = False, self._before or {}
        now = _buffers(trainer, pl_module)  # with those that the network has made in its first pass
        changed = {name: now[name].cpu() for name in before if not are_equal(now[name], before[name])}
        ranks: list[Any] = [changed]
        if trainer.world_size > 1:  # all must stop, also the ranks of a pipeline that do not have the buffer
            ranks = [None] * trainer.world_size
            dist.all_gather_object(ranks, changed)
        weights = dict(pl_module.named_parameters())  # which a hook may update once for all micro-batches
        for name in sorted(set().union(*ranks)):
            is_same = all(name in rank and are_equal(rank[name], ranks[0][name]) for rank in ranks)
            is_divided_again = trainer.datamodule.layout.micro_batches > 1 and name not in weights
            if not is_same or is_divided_again:
                raise UserError(
                    f"the forward pass updates {name} from the samples of one rank, or once for each micro-batch, so "
                    "the run would depend on them: register it as a buffer, if it is a weight, and set bit_exact=true"
                )


def _buffers(trainer: L.Trainer, module: Any) -> dict[str, Tensor]:
    """Return what could depend on the hardware; a pipeline calls only its network for each micro-batch."""
    part = module.net if trainer.datamodule.parallel.num_microbatches > 1 else module
    norms = tuple(f"{name}." for name, layer in part.named_modules() if isinstance(layer, _BatchNorm))
    weights = {name: weight for name, weight in part.named_parameters() if not weight.requires_grad}
    whole = {name: weight for name, weight in weights.items() if not isinstance(weight, DTensor)}
    return whole | {name: buffer for name, buffer in part.named_buffers() if not name.startswith(norms)}


class FiniteCheck(L.Callback):
    """Stops a run that has diverged.

    The training loss is checked at every log point, where it is the same on every rank, so that all ranks stop
    together. All weights are checked before a checkpoint is saved. If ranks hold different weights, one rank may stop
    alone; the launcher then ends the others.
    """

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if is_log_point(trainer, trained_steps(trainer)):
            loss = float(trainer.callback_metrics.get("train/loss", 0.0))
            if not math.isfinite(loss):
                raise _divergence(trainer, f"train/loss is {loss}")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let all ranks compute the metrics of the epoch, which communicate, before rank zero's progress bar does."""
        _ = trainer.callback_metrics

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _ = trainer.callback_metrics

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for name, tensor in checkpoint["state_dict"].items():
            local = to_local(tensor)
            if local.is_floating_point() and not torch.isfinite(local).all():
                raise _divergence(trainer, f"{name} is not finite")


def _divergence(trainer: L.Trainer, problem: str) -> UserError:
    return UserError(
        f"{problem} at step {trained_steps(trainer)}: training diverged; lower optimizer.lr or lengthen "
        f"scheduler.warmup; the checkpoints in {trainer.default_root_dir}/checkpoints, if any, are from before"
    )
