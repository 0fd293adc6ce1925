"""Keep in checkpoints what metrics have accumulated: torchmetrics, and the values of `self.log(..., on_epoch=True)`."""

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_mean

_COUNT = "_update_count"  # of a metric, saved beside its states
_State = dict[str, Any]  # tensors, and lists of them, by the names of a metric's states


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
