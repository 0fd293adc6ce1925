"""The ranks over which metrics synchronize: torchmetrics takes all ranks, also of a pipeline, which share samples."""

from typing import Any

import lightning as L
import torch.distributed as dist
from torchmetrics import Metric

from onecurve.parallel.gather import group_of_samples
from onecurve.patches.torchmetrics import replace_sync
from onecurve.run.metric_states import metrics_of, synchronize


class MetricSync(L.Callback):
    """Lets all ranks compute metrics together, and count each sample once, although all ranks of a pipeline hold it.

    torchmetrics gathers the elements of a list one by one, if nothing reduces it, such as the images of a
    `MeanAveragePrecision`. Ranks that have evaluated different numbers of them would wait for each other, or take one
    state for another; so all states are gathered at once.

    A metric that has a `process_group` or `dist_sync_fn` of its own keeps it. So do those of virtual ranks, which
    `VirtualMetrics` reduces. Metrics may be made by hooks, so they are looked for at the end of an epoch, too.
    """

    def _begin(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if not dist.is_initialized() or trainer.datamodule.bit_exact:
            return
        group = group_of_samples(trainer)

        def synchronize_over_group(metric: Metric, *_: Any, **__: Any) -> None:  # no partial: groups cannot be copied
            synchronize(metric, group)

        for metric in metrics_of(trainer, pl_module).values():
            if metric.process_group is None and metric.dist_sync_fn is None:
                replace_sync(metric, synchronize_over_group)

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
