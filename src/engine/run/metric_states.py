"""Keep in checkpoints what metrics have accumulated: torchmetrics, and the values of `self.log(..., on_epoch=True)`."""

import logging
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

_log = logging.getLogger(__name__)
_COUNT = "_update_count"  # of a metric, saved beside its states
_REDUCTIONS = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min)
_State = dict[str, Any]  # tensors, and lists of them, by the names of a metric's states


class MetricStates(L.Callback):
    """Saves the states of all metrics, reduced over the data-parallel ranks, and restores them on the first rank.

    The mean of an epoch thus covers the whole epoch after a resumption within it, also on other ranks. A checkpoint
    between two epochs omits the metrics that the module logs, because Lightning resets these.
    """

    def __init__(self) -> None:
        self._saved: dict[str, _State] = {}  # of a checkpoint, until they are restored
        self._is_within_epoch = False
        self._has_warned = False

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        metrics = _metrics_to_save(trainer, pl_module, is_within_epoch=checkpoint["position"]["samples"] > 0)
        own = {name: _state(metric) for name, metric in metrics.items() if name not in self._saved}
        ranks = [own] * trainer.datamodule.parallel.dp_size
        if len(ranks) > 1:
            dist.all_gather_object(ranks, own, trainer.distributed_sampler_kwargs.get("group"))
        states = {name: _reduce(metrics[name], [states[name] for states in ranks if name in states]) for name in own}
        checkpoint["metric_states"] = self._saved | {name: state for name, state in states.items() if state}
        omitted = [name for name, state in states.items() if state is None]
        if omitted and not self._has_warned:
            self._has_warned = True
            _log.warning("checkpoints omit the state of %s: it has no sum over the ranks", " and ".join(omitted))

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
            _add(results[name], self._saved.pop(name), trainer.datamodule.parallel.dp_rank)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_train_batch_end(trainer)
        self._saved = {}

    def _restore(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._saved:
            for name, metric in _metrics(module).items():
                if name in self._saved:
                    _set(metric, self._saved.pop(name), trainer.datamodule.parallel.dp_rank)


def _metrics(module: L.LightningModule) -> dict[str, Metric]:
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def _metrics_to_save(trainer: L.Trainer, module: L.LightningModule, is_within_epoch: bool) -> dict[str, Metric]:
    """Return the metrics by name, without those that Lightning resets before a resumed run would use them."""
    loop = trainer.fit_loop.epoch_loop
    results: dict[str, Any] = loop._results if is_within_epoch else {}
    accumulated = {name: item for name, item in results.items() if item.is_tensor and item.meta.on_epoch}
    finished = [*loop.val_loop._results.values(), *([] if is_within_epoch else loop._results.values())]
    reset = {id(item.value) for item in finished}  # metrics have an `==` of their own
    return accumulated | {name: metric for name, metric in _metrics(module).items() if id(metric) not in reset}


def _state(metric: Metric) -> _State:
    state = {name: getattr(metric, name) for name in (_COUNT, *metric._defaults)}
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), state)


def _reductions(metric: Any) -> dict[str, Any]:
    """Return the reduction over ranks of each state; Lightning's own values have another in the place of theirs."""
    if not isinstance(metric, _ResultMetric):
        return metric._reductions
    reduction = {torch.max: dim_zero_max, torch.min: dim_zero_min}.get(metric.meta.reduce_fx, dim_zero_sum)
    return dict.fromkeys(metric._defaults, reduction)


def _reduce(metric: Any, ranks: list[_State]) -> _State | None:
    """Return the state of all ranks from that of each, or None if there is none, as for a correlation."""
    is_synchronized = metric.meta.sync.should if isinstance(metric, _ResultMetric) else metric.sync_on_compute
    state = {_COUNT: max(rank[_COUNT] for rank in ranks)}
    if not is_synchronized or not state[_COUNT]:
        return ranks[0]  # the run logs the value of rank zero
    for name, reduction in _reductions(metric).items():
        values = [rank[name] for rank in ranks]
        if isinstance(values[0], list):
            state[name] = [item for part in values for item in part]
        elif reduction in _REDUCTIONS:
            state[name] = reduction(torch.stack(values))
        elif len(ranks) > 1:
            return None
        else:
            state[name] = values[0]
    return state


def _set(metric: Metric, state: _State, rank: int) -> None:
    """Set the state on the first rank, and the default on the others; all of them get a mean, and the count."""
    Metric.reset(metric)  # the `reset` of a wrapper would reset other metrics
    for name, value in tree_map_only(Tensor, lambda tensor: tensor.to(metric.device, non_blocking=True), state).items():
        if rank == 0 or metric._reductions.get(name, dim_zero_mean) is dim_zero_mean:
            setattr(metric, name, value)


def _add(result: Any, state: _State, rank: int) -> None:
    """Add the state to Lightning's own value on the first rank, and the default on the others."""
    for name, reduction in _reductions(result).items():
        saved = state[name] if rank == 0 else result._defaults[name]
        # Lightning's mean over ranks would truncate the number of samples, an integer.
        values = [tensor.to(result.value, non_blocking=True) for tensor in (getattr(result, name), saved)]
        setattr(result, name, reduction(torch.stack(values)))
    result._computed = None
