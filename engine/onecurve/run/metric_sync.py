"""The ranks over which metrics synchronize: torchmetrics takes all ranks, also of a pipeline, which share samples."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities.distributed import gather_all_tensors

from onecurve.parallel.gather import group_of_samples
from onecurve.patches.torchmetrics import default_states, reductions, replace_sync
from onecurve.run.metric_states import metrics_of, synchronize


class MetricSync(L.Callback):
    """Lets all ranks compute metrics together, and count each sample once, although all ranks of a pipeline hold it.

    torchmetrics gathers the elements of a list one by one, if nothing reduces it, such as the images of a
    `MeanAveragePrecision`. Ranks that have evaluated different numbers of them would wait for each other, or take one
    state for another; so the lists are gathered at once.

    A metric that has a `process_group` or `dist_sync_fn` of its own keeps it. So do those of virtual ranks, which
    `VirtualMetrics` reduces. Metrics may be made by hooks, so they are looked for at the end of an epoch, too.
    """

    def __init__(self) -> None:
        self._gather: Callable[..., Any] | None = None  # one function, by which `teardown` knows it

    def _begin(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if not dist.is_initialized() or trainer.datamodule.bit_exact:
            return
        group = group_of_samples(trainer)
        is_alone = dist.get_world_size(group) == 1
        self._gather = self._gather or _gather_over(group)
        for metric in metrics_of(trainer, pl_module).values():
            if metric.process_group is not None or metric.dist_sync_fn is not None:
                continue
            if not is_alone and _has_unreduced_list(metric):
                replace_sync(metric, _synchronize_over(group))
            elif group is None:
                continue
            elif not is_alone:
                metric.dist_sync_fn = self._gather
            elif metric.distributed_available_fn is jit_distributed_available:
                metric.distributed_available_fn = _is_never_distributed

    on_fit_start = on_validation_start = on_test_start = on_predict_start = _begin
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _begin

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let all ranks compute the metrics, which communicate, before rank zero's progress bar does."""
        self._begin(trainer, pl_module)
        _ = trainer.callback_metrics

    on_validation_end = on_train_epoch_end

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for metric in metrics_of(trainer, pl_module).values():
            replace_sync(metric, None)
            if metric.dist_sync_fn is not None and metric.dist_sync_fn is self._gather:
                metric.dist_sync_fn = None
            if metric.distributed_available_fn is _is_never_distributed:
                metric.distributed_available_fn = jit_distributed_available
        self._gather = None


def _gather_over(group: Any) -> Callable[..., Any]:
    """Return a function, which copies of a metric share: torchmetrics cannot copy a `process_group`."""

    def gather(tensor: Tensor, **_: Any) -> list[Tensor]:
        return gather_all_tensors(tensor, group)

    return gather


def _synchronize_over(group: Any) -> Callable[..., None]:
    """Return a function that a copy of a metric calls with the copy."""

    def function(metric: Metric, *_: Any, **__: Any) -> None:
        synchronize(metric, group)

    return function


def _has_unreduced_list(metric: Metric) -> bool:
    found = reductions(metric)
    return any(isinstance(default, list) and found[name] is None for name, default in default_states(metric).items())


def _is_never_distributed() -> bool:
    return False
