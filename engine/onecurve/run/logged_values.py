"""What `self.log` of a module becomes: values that count the samples of each rank, and are logged at log points.

`patch_trainer` of `onecurve/run/training_loop.py` gives a trainer both classes.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from onecurve.errors import UserError
from onecurve.observe.steps import is_log_point
from onecurve.parallel.gather import gather_objects, group_of_samples
from onecurve.patches.lightning_loops import LoggedMean, LoggerConnector, Results, steps_of_loggers
from onecurve.patches.torchmetrics import default_states, reductions
from onecurve.run.metric_states import VirtualMetrics
from onecurve.run.pass_log import PassLog

_log = logging.getLogger(__name__)


class LoggedValues(Results):
    """Counts the samples of a logged mean as floats, and names the reduction of a maximum or minimum.

    Lightning averages the counts over the ranks as integers, which rounds down. It also tells torchmetrics that a
    maximum is a sum, which `MetricStates` would then take. `__setitem__` corrects both.
    (trainer/connectors/logger_connector/result.py, line 202; fabric/utilities/distributed.py, `_sync_ddp`)

    Where `VirtualMetrics` reduces the means of evaluation over virtual ranks, processes have the same values, and need
    not synchronize them. Otherwise the ranks that share the samples do so.
    """

    def __init__(self, trainer: Any, training: bool) -> None:
        super().__init__(training)
        self._trainer, self.virtual = trainer, trainer.virtual_metrics
        self.dtype = torch.float64 if trainer.precision == "64-true" else torch.float32
        self._pass_log: PassLog | None = None
        self.rank_weight, self.samples = 1.0, 0  # of this rank's step: samples, also relative to the mean of the ranks
        self._warned = set[str]()
        self._group: Any = None  # of the ranks that share the samples, in the stage of the values

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
        group = group_of_samples(self._trainer)
        if group is not self._group:
            self.clear()  # each stage of a pipeline makes one, and Lightning compares the options of a value
            self._group = group
        if isinstance(value, Metric) and options["on_step"] and self.training:
            self._warn_of_share(name, value)
        if self.virtual:
            _check_virtual(self.virtual, name, value, options, self.training)
        if self.rank_weight != 1 and isinstance(value, Tensor) and options["sync_dist"]:
            value, options = self._weighted(value, options)
        if options["sync_dist"] and options["sync_dist_group"] is None:  # a sum counts each sample once
            options = options | {"sync_dist_group": group}
        super().log(fx, name, value, **options | {"sync_dist": options["sync_dist"] and not self.virtual})

    def _warn_of_share(self, name: str, metric: Metric) -> None:
        """Warn once of a metric whose value of a step, as torchmetrics computes it, is that of this rank's samples."""
        is_shared = self._trainer.datamodule.parallel.dp_size > 1 and not self.virtual and not metric.dist_sync_on_step
        if is_shared and name not in self._warned:
            self._warned.add(name)
            _log.warning(
                "%s: the value of a step is that of rank zero's samples: make the metric with dist_sync_on_step=True, "
                "log it with on_step=False, or set bit_exact=true",
                name,
            )

    def _weighted(self, value: Tensor, options: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Weight a value of unequal ranks, whose mean Lightning takes: in a step their mean, in an epoch by samples."""
        if getattr(options["reduce_fx"], "__name__", options["reduce_fx"]) != "mean":
            return value, options
        return value * self.rank_weight, options | {
            "batch_size": (options["batch_size"] or self.samples) / self.rank_weight
        }

    def __setitem__(self, name: str, result: LoggedMean) -> None:
        super().__setitem__(name, result)
        if result.is_tensor and result.meta.reduce_fx in (torch.max, torch.min):
            reductions(result)["value"] = result.meta.reduce_fx
        if self.virtual and result.is_tensor and not self.training:
            self.virtual.add_mean(name, result)
        if "cumulated_batch_size" in default_states(result):
            default_states(result)["cumulated_batch_size"] = torch.zeros((), dtype=self.dtype)
            result.cumulated_batch_size = result.cumulated_batch_size.to(self.dtype)


def _check_virtual(virtual: VirtualMetrics, name: str, value: Any, options: dict[str, Any], is_training: bool) -> None:
    """Raise a UserError for a value that would depend on how many virtual ranks a process has."""
    if options["on_step"] and not is_training:
        raise UserError(
            f"bit_exact=true: {name} is logged for each batch of an evaluation, of which processes have different "
            "numbers: log it with on_step=False"
        )
    is_reduced = options["sync_dist"] or not is_training  # callbacks and schedules follow values of an evaluation
    if virtual.is_in_pass or not (is_reduced and isinstance(value, Tensor) and dist.is_initialized()):
        return
    if any(other != value and not math.isnan(other) for other in gather_objects(float(value))):
        raise UserError(
            f"bit_exact=true: {name} is logged outside of a step of the module, and processes have different values, "
            "from the batches that each has seen: log it in the step, as a metric of torchmetrics, or after all_gather"
        )


class LogPoints(LoggerConnector):
    """Passes the metrics of the first and the last step to the loggers, not only those of each interval.

    It also ends the passes of virtual ranks before the metrics of an evaluation are computed, which no hook precedes.
    (trainer/connectors/logger_connector/logger_connector.py, line 51; loops/evaluation_loop.py, line 385)
    """

    @property
    def should_update_logs(self) -> bool:
        steps = steps_of_loggers(self.trainer)
        return super().should_update_logs or (self.trainer.training and is_log_point(self.trainer, steps + 1))

    def samples_of_batch(self) -> int | None:
        data: Any = self.trainer.datamodule
        sizes = [part.size for part in (data.parts[:1] if data.bit_exact else data.parts)]  # as hooks get the batch
        return None if None in sizes else sum(sizes)

    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        virtual = cast(Any, self.trainer).virtual_metrics
        if virtual:
            virtual.leave()
