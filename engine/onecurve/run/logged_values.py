"""What `self.log` of a module becomes: values that count the samples of each rank, and are logged at log points.

`onecurve.Trainer` puts `LoggedValues` into Lightning's loops, and `LogPointConnector` between these and the loggers. A
step of several parts logs to a `PassLog` first (`onecurve/run/step.py`).
"""

import logging
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from onecurve.errors import UserError
from onecurve.network.precision import is_double
from onecurve.observe.steps import is_log_point
from onecurve.patches.lightning_loops import LoggerConnector, ResultCollection, current_results, steps_of_loggers
from onecurve.patches.torchmetrics import default_states, reductions, set_step_value, step_value
from onecurve.process.gather import group_of_samples, names_that_differ
from onecurve.run.metric_states import VirtualMetrics

_log = logging.getLogger(__name__)
_FIRST_COLUMNS = 2  # of the table of a `PassLog`: the loss of a pass, and a hash of the names that it logs


class PassLog:
    """Gathers what `training_step` logs in each pass, and logs the mean, sum, maximum or minimum of the passes.

    A metric object is logged once; its value of the step is the mean over the passes. The values are in a table on
    `device` with a row for each pass, which processes can exchange.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.dtype = device, torch.float32 if device.type == "mps" else torch.float64
        self._logged: dict[tuple[str, str, int], _PassValues] = {}
        self._calls = Counter[tuple[str, str]]()  # of the current pass
        self._hashes: list[int] = []
        self._losses: list[Tensor | None] = []

    def add(self, fx: str, name: str, value: Any, options: dict[str, Any]) -> None:
        """Keep a value that the hook `fx` logs in this pass; `options` are the other arguments of Lightning's log."""
        key = (fx, name, self._calls[fx, name])
        self._calls[fx, name] += 1
        self._logged.setdefault(key, _PassValues()).add(len(self._losses), value, options)

    def end_pass(self, loss: Tensor | None) -> None:
        content = repr((sorted(self._calls.items()), loss is None))
        self._hashes.append(zlib.crc32(content.encode()) & 0xFFFFFF)  # float32 represents it
        self._losses.append(loss)
        self._calls.clear()

    def rows(self) -> Tensor:
        """Return the rows of these passes: the loss, the hash, and the value and the weight of each name."""
        rows = []
        for number, (names, loss) in enumerate(zip(self._hashes, self._losses, strict=True)):
            cells = [0.0 if loss is None else loss, names]
            for _, logged in sorted(self._logged.items()):  # by unique names: in one order on all processes
                cells += logged.cells(number)
            rows.append(torch.stack([self._to_cell(value) for value in cells]))
        return torch.stack(rows)

    def _to_cell(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self.device, self.dtype).view(())
        return torch.full((), value, dtype=self.dtype, device=self.device)  # without a transfer

    def log(self, results: Any, table: Tensor, is_complete: bool) -> None:
        """Log each name once; `is_complete`: the table has the rows of all processes, not only those of this one."""
        columns = table[:, _FIRST_COLUMNS:].T
        for number, ((fx, name, _), logged) in enumerate(sorted(self._logged.items())):
            values, weights = columns[2 * number : 2 * number + 2]
            results.log(fx, name, logged.of_step(values, weights), **logged.arguments(weights, is_complete))

    def mean_loss(self, table: Tensor) -> Tensor | None:
        """Return the mean loss of the passes, or None if `training_step` returned None."""
        losses = [loss for loss in self._losses if loss is not None]
        if not losses:
            return None
        if len(losses) < len(self._losses):
            raise UserError(
                "training_step returns None for some micro-batches of a step, which cannot be skipped in part: return "
                "None for none of them, or set trainer.accumulate_grad_batches=1"
            )
        return table[:, 0].mean().to(losses[0].dtype)


def have_equal_names(table: Tensor) -> Tensor:
    """Return whether all passes have logged the same names, and all or none of them a loss: a bool on the device."""
    return (table[:, 1] == table[0, 1]).all()


def _reduction(options: dict[str, Any]) -> str:
    """Return the name of what reduces a logged value, which is a function of torch, or its name."""
    function = options["reduce_fx"]
    return str(getattr(function, "__name__", function)).lower()


class _PassValues:
    """The values that the passes log under one name."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.value: Any = None  # of the last pass
        self.is_scalar = False
        self.of_passes: dict[int, tuple[Any, int | None]] = {}  # the value and the number of samples

    def add(self, number: int, value: Any, options: dict[str, Any]) -> None:
        self.options, self.value = options, value
        of_pass: Any = step_value(value) if isinstance(value, Metric) else value
        self.is_scalar = isinstance(of_pass, Tensor) and of_pass.numel() == 1
        # The next replay of a CUDA graph overwrites its output.
        self.of_passes[number] = (of_pass.clone() if self.is_scalar else 0.0, options["batch_size"])

    def cells(self, number: int) -> list[Any]:
        """Return the value of a pass and its weight, which is 0 if the pass did not log."""
        value, size = self.of_passes.get(number, (0.0, 0))
        return [value, 1 if size is None else size]

    def of_step(self, values: Tensor, weights: Tensor) -> Any:
        """Return what the step logs, from the (passes,) values and their weights."""
        reduced = self._reduce(values, weights)
        if isinstance(self.value, Metric):
            if self.is_scalar:
                set_step_value(self.value, reduced.to(step_value(self.value).dtype))
            return self.value
        dtype = self.value.dtype if self.value.is_floating_point() else torch.get_default_dtype()
        return reduced.to(self.value.device, dtype)

    def _reduce(self, values: Tensor, weights: Tensor) -> Tensor:
        name = _reduction(self.options)
        if name == "sum":
            return values.sum()
        if name == "max":
            return values.where(weights > 0, -math.inf).max()
        if name == "min":
            return values.where(weights > 0, math.inf).min()
        return (values * weights).sum() / weights.sum()

    def arguments(self, weights: Tensor, is_complete: bool) -> dict[str, Any]:
        """Return the arguments of Lightning's log for the value of the step."""
        has_sizes = self.options["batch_size"] is not None
        if is_complete:  # so that no process need ask others
            size: Any = weights.sum() if has_sizes else 1
            return self.options | {"batch_size": size, "sync_dist": False, "sync_dist_fn": None}
        size = sum(size or 0 for _, size in self.of_passes.values()) if has_sizes else None
        return self.options | {"batch_size": size}


class LoggedValues(ResultCollection):
    """The values that a loop has logged; a mean is that of all samples, however the ranks share them.

    Lightning averages the counts of samples over the ranks as integers, which rounds down; here they are floats. It
    also tells torchmetrics that a maximum is a sum, which `MetricStates` would then take. `__setitem__` corrects both.
    (trainer/connectors/logger_connector/result.py, line 202; fabric/utilities/distributed.py, `_sync_ddp`)

    Where `VirtualMetrics` reduces the means of evaluation over virtual ranks, processes have the same values, and need
    not synchronize them. Otherwise the ranks that share the samples do so.
    """

    def __init__(self, trainer: Any, training: bool) -> None:
        super().__init__(training)
        self._trainer, self.virtual = trainer, trainer.virtual_metrics
        self.dtype = torch.float64 if is_double(trainer.precision) else torch.float32
        self._pass_log: PassLog | None = None
        self.num_samples = 0  # of this rank in the step; `StepInParts` sets it and the next
        self.rank_weight = 1.0  # their number, relative to the mean of the ranks
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
            self.clear()  # in a pipeline fit, validate and test each make one, and Lightning compares options
            self._group = group
        if isinstance(value, Metric) and options["on_step"] and self.training:
            self._warn_of_share(name, value)
        if self.virtual:
            _check_virtual(self.virtual, name, value, options, self.training)
        is_reduced = isinstance(value, Tensor) and options["sync_dist"]
        if self.rank_weight != 1 and is_reduced and _reduction(options) == "mean":
            # Lightning takes the mean over the ranks, of which this one has w of the mean number of samples, and counts
            # the value as `batch_size`. So a step logs the mean of w * value, and an epoch adds (w * value) * (n / w).
            size = (options["batch_size"] or self.num_samples) / self.rank_weight
            value, options = value * self.rank_weight, options | {"batch_size": size}
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

    def __setitem__(self, name: str, result: Any) -> None:
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
    if names_that_differ({name: float(value)}):
        raise UserError(
            f"bit_exact=true: {name} is logged outside of a step of the module, and processes have different values, "
            "from the batches that each has seen: log it in the step, as a metric of torchmetrics, or after all_gather"
        )


class LogPointConnector(LoggerConnector):
    """Passes the metrics of the first and the last step to the loggers, not only those of each interval.

    It weights a mean by the samples of each batch. Lightning takes the size of the first tensor of the batch, which is
    the length of sequences that come time first. It also ends the passes of virtual ranks before the metrics of an
    evaluation are computed, which no hook precedes.
    It lets a hook begin its values once in the first step of an epoch, and of a run that goes on. Lightning begins them
    again if another hook has logged in between, as within the closures of LBFGS or between two optimizers.
    (trainer/connectors/logger_connector/logger_connector.py, lines 51, 197 and 223; loops/evaluation_loop.py, line 385)
    """

    _begun: frozenset[str] = frozenset()  # the hooks that have begun their values since the start of the batch

    def should_reset_tensors(self, fx: str) -> bool:
        should_reset = fx not in self._begun and super().should_reset_tensors(fx)
        self._begun |= {fx} if should_reset else set()
        return should_reset

    @property
    def should_update_logs(self) -> bool:
        steps = steps_of_loggers(self.trainer)
        return super().should_update_logs or (self.trainer.training and is_log_point(self.trainer, steps + 1))

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        super().on_batch_start(batch, dataloader_idx)
        self._begun = frozenset()
        data: Any = self.trainer.datamodule
        sizes = [part.size for part in (data.parts[:1] if data.bit_exact else data.parts)]  # as hooks get the batch
        current_results(self.trainer).batch_size = None if None in sizes else sum(sizes)  # None for Lightning's count

    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        if virtual := cast(Any, self.trainer).virtual_metrics:
            virtual.leave()
