"""Changes of Lightning's training loop: signals, log points, intervals in steps, metrics that a checkpoint keeps.

The callbacks check monitored metrics, buffers that would depend on the hardware, and divergence.

`patch_trainer` names Lightning's lines, relative to
https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/. When Lightning changes,
`tests/engine/run/test_training_loop.py` or `tests/engine/test_canaries.py` fails.
"""

import logging
import math
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_mean

from src.engine.determinism.sampler import validation_interval
from src.engine.determinism.seeding import are_equal
from src.engine.utils.errors import UserError
from src.engine.utils.steps import is_log_point
from src.engine.utils.tensors import to_local

_log = logging.getLogger(__name__)
_COUNT = "_update_count"  # of a metric, saved beside its states
_State = dict[str, Any]  # tensors, and lists of them, by the names of a metric's states


def patch_trainer(trainer: L.Trainer) -> None:
    """Patch the parts of a trainer that results depend on."""
    signals: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    # Lightning's handler of signals broadcasts wherever the signal interrupts the process, so ranks could wait for each
    # other forever; and every step broadcasts whether a rank received SIGTERM. `src/engine/run/stopping.py` handles
    # signals. To replace the handler in `on_train_start` would be too late: it is active in the barrier and the sanity
    # check before. (trainer/connectors/signal_connector.py, lines 45 and 108; loops/training_epoch_loop.py, lines 259
    # and 300)
    signals.register_signal_handlers = _do_nothing
    loop._broadcast_sigterm_tensor = _do_nothing
    loop._results = _Results(training=True)
    for evaluation in (loop.val_loop, trainer.validate_loop, trainer.test_loop):
        evaluation._results = _Results(training=False)
    trainer._logger_connector.__class__ = _LogPointConnector


def _do_nothing(*_: Any) -> None:
    """Replace a method of Lightning."""


class _Results(_ResultCollection):
    """Counts the samples of a logged mean as floats, and names the reduction of a maximum or minimum.

    Lightning averages the counts over the ranks as integers, which rounds down, and declares a sum for torchmetrics,
    which `MetricStates` uses. (trainer/connectors/logger_connector/result.py, line 202;
    fabric/utilities/distributed.py, `_sync_ddp`)
    """

    def __setitem__(self, name: str, result: _ResultMetric) -> None:
        super().__setitem__(name, result)
        if result.is_tensor and result.meta.reduce_fx in (torch.max, torch.min):
            result._reductions["value"] = result.meta.reduce_fx
        if "cumulated_batch_size" in result._defaults:
            result._defaults["cumulated_batch_size"] = torch.tensor(0.0)
            result.cumulated_batch_size = result.cumulated_batch_size.float()


class _LogPointConnector(_LoggerConnector):
    """Passes the metrics of the first and the last step to the loggers, not only those of each interval.

    (trainer/connectors/logger_connector/logger_connector.py, line 51)
    """

    @property
    def should_update_logs(self) -> bool:
        steps = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        return super().should_update_logs or (self.trainer.training and is_log_point(self.trainer, steps + 1))


class OptimizerSteps(L.Callback):
    """Converts the intervals of validation and schedulers, and makes up for steps of ReduceLROnPlateau.

    Lightning counts micro-batches. It steps ReduceLROnPlateau after an epoch's checkpoint is saved, and not at all
    after the first epoch of a restart (`_FitLoop.on_advance_end` and `_TrainingEpochLoop._update_learning_rates` in
    loops/).
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        if stage == "fit" and data.evaluated_samples("val"):
            may_cross_epochs = trainer.check_val_every_n_epoch is None
            trainer.val_check_interval = validation_interval(
                trainer.val_check_interval, data.steps_per_epoch, data.accumulate, may_cross_epochs
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.last_step = trainer.datamodule.total_steps  # `is_log_point` reads it
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                config.frequency *= trainer.accumulate_grad_batches

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
        monitors: the validation metric of each callback that monitors one, by the option of the callback.
    """

    def __init__(self, monitors: dict[str, str]) -> None:
        self.monitors = monitors

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.monitors and not trainer.datamodule.evaluated_samples("val"):
            _log.warning("the run has no validation, so %s cannot act", " and ".join(self.monitors))
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
    """Refuses a network that updates a buffer from the samples of one rank, or once for each micro-batch.

    It compares the buffers before and after the first backward pass of a run. `src/engine/parallel/batch_norm.py` takes
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
        for name in sorted(set().union(*ranks)):
            is_same = all(name in rank and are_equal(rank[name], ranks[0][name]) for rank in ranks)
            if not is_same or trainer.datamodule.layout.micro_batches > 1:
                raise UserError(
                    f"{name} is a buffer that the forward pass updates from the samples of one rank, or once for each "
                    "micro-batch, so the run would depend on them: train on one device, or (for micro-batches) without "
                    "trainer.accumulate_grad_batches and pipelines"
                )


def _buffers(trainer: L.Trainer, module: Any) -> dict[str, Tensor]:
    """Return the buffers that could depend on the hardware; a pipeline calls only its network for each micro-batch."""
    part = module.net if trainer.datamodule.parallel.num_microbatches > 1 else module
    norms = tuple(f"{name}." for name, layer in part.named_modules() if isinstance(layer, _BatchNorm))
    return {name: buffer for name, buffer in part.named_buffers() if not name.startswith(norms)}


class FiniteCheck(L.Callback):
    """Stops a run that has diverged.

    The training loss is checked at every log point, where it is the same on every rank, so that all ranks stop
    together. All weights are checked before a checkpoint is saved. If ranks hold different weights, one rank may stop
    alone; the launcher then ends the others.
    """

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if is_log_point(trainer, trainer.global_step):
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
        f"{problem} at step {trainer.global_step}: training diverged; lower optimizer.lr or lengthen "
        f"scheduler.warmup; the checkpoints in {trainer.default_root_dir}/checkpoints, if any, are from before"
    )


class MetricStates(L.Callback):
    """Saves the states of all metrics, reduced over the data-parallel ranks, and restores them on the first rank.

    The mean of an epoch thus covers the whole epoch after a resumption within it, also on other ranks. A checkpoint
    between two epochs omits the metrics that the module logs, because Lightning resets these. A state without a sum
    over ranks, such as that of a correlation, is the first rank's.
    """

    def __init__(self) -> None:
        self._saved: dict[str, _State] = {}  # of a checkpoint, until they are restored
        self._is_within_epoch = False

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        metrics = _metrics_to_save(trainer, pl_module, is_within_epoch=checkpoint["position"]["samples"] > 0)
        own = {name: _state(metric) for name, metric in metrics.items() if name not in self._saved}
        ranks = [own] * trainer.datamodule.parallel.dp_size
        if len(ranks) > 1:
            dist.all_gather_object(ranks, own, trainer.distributed_sampler_kwargs.get("group"))
        states = {name: _reduce(metrics[name], [states[name] for states in ranks if name in states]) for name in own}
        checkpoint["metric_states"] = self._saved | states

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.training:
            self._saved = checkpoint.get("metric_states", {})
            self._is_within_epoch = checkpoint["position"]["samples"] > 0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore before the module resets metrics for a new epoch."""
        if not self._is_within_epoch:
            self._restore(trainer, pl_module)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Restore after the module has reset metrics at the start of training, or of the epoch that it continues."""
        self._restore(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Restore a value that Lightning accumulates after its first `self.log`, which begins it."""
        results = trainer.fit_loop.epoch_loop._results
        for name in self._saved.keys() & results.keys():
            result, state = results[name], self._saved.pop(name)
            own = state if trainer.datamodule.parallel.dp_rank == 0 else result._defaults
            # The type is that of the value on all ranks, as the collective of Lightning's mean needs it.
            result._reduce_states({key: own[key].to(result.value, non_blocking=True) for key in result._defaults})
            result._computed = None

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved = {}

    def _restore(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Set each state on the first rank, and the default on the others; all of them get a mean, and the count."""
        for name, metric in _metrics(module).items():
            if name not in self._saved:
                continue
            Metric.reset(metric)  # the `reset` of a wrapper would reset other metrics
            # The host need not wait for the device.
            saved = tree_map_only(Tensor, lambda x: x.to(module.device, non_blocking=True), self._saved.pop(name))
            for key, value in saved.items():
                is_mean = metric._reductions.get(key, dim_zero_mean) is dim_zero_mean
                if is_mean or trainer.datamodule.parallel.dp_rank == 0:
                    setattr(metric, key, value)


def _metrics(module: L.LightningModule) -> dict[str, Metric]:
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def _metrics_to_save(trainer: L.Trainer, module: L.LightningModule, is_within_epoch: bool) -> dict[str, Metric]:
    """Return the metrics by name, without those that Lightning resets before a resumed run would use them."""
    loop: Any = trainer.fit_loop.epoch_loop
    accumulated: dict[str, Any] = {}
    finished = [*loop.val_loop._results.values(), *([] if is_within_epoch else loop._results.values())]
    if is_within_epoch:
        accumulated = {name: item for name, item in loop._results.items() if item.is_tensor and item.meta.on_epoch}
    reset = {id(item.value) for item in finished}  # metrics have an `==` of their own
    return accumulated | {name: metric for name, metric in _metrics(module).items() if id(metric) not in reset}


def _state(metric: Metric) -> _State:
    state = {name: getattr(metric, name) for name in (_COUNT, *metric._defaults)}
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), state)


def _reduce(metric: Any, ranks: list[_State]) -> _State:
    """Return the state of all ranks from that of each; that of the first if the run logs its value, or has no sum."""
    is_synchronized = metric.meta.sync.should if isinstance(metric, _ResultMetric) else metric.sync_on_compute
    state = {_COUNT: max(rank[_COUNT] for rank in ranks)}
    for name, reduction in metric._reductions.items():
        values = [rank[name] for rank in ranks]
        if isinstance(values[0], list):
            state[name] = [item for part in values for item in part]
        elif reduction:
            state[name] = reduction(torch.stack(values))
    return state if is_synchronized and state.keys() == ranks[0].keys() else ranks[0]
