"""Measure training speed, data-loading time and peak memory, and compare the ranks."""

import logging
import math
from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import median
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch import Tensor

from src.engine.observe.flops import flops_per_sample, peak_flops
from src.engine.observe.recording import RecordedStep, synchronize
from src.engine.observe.timeline import Timeline
from src.engine.utils.log_points import is_log_point
from src.engine.utils.memory import peak_memory_mib

_log = logging.getLogger(__name__)
_MIN_GAIN = 0.05  # fraction of a step; below it, ranks differ by chance
_MIN_LOG_POINTS = 3
_MAX_LOG_POINTS = 1000  # the newest ones: 100,000 of 64 ranks would take 200 MiB in each process


class Throughput(L.Callback):
    """Logs the speed of the steps since the last log point under `throughput/`, and a summary when training ends.

    `samples_per_sec`: images per second over all processes. `step_ms`: milliseconds of one optimizer step.
    `data_fraction`: fraction of a step between the end of a batch and the start of the next, when the host fetches,
    transfers and augments data. `peak_memory_mib`: largest memory of any process: allocated tensors on a GPU, resident
    set size on a CPU. `mfu`: model FLOPs utilization (Chowdhery et al., "PaLM", 2022), if the device's peak is known
    and the module has a method `loss`, which a GAN has not.

    With several processes, `ranks/` has their memory and, if `callbacks.timeline` records steps, the time for which
    they work in a step; training ends with a message about a rank for which the others wait. Ranks that train in
    lockstep take equally long for a step, because the fast ones wait for the slow ones in collectives. A slow rank is
    therefore found by its busy time, the time of a step in which it does not wait.

    Validation, checkpoints and logging are not counted. Times are host times. They are exact only over the interval
    between two log points, where the host waits for the GPU.

    Args:
        peak_tflops: peak TFLOP/s of one device in the run's precision, if Lightning's figure is missing or wrong.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        self.peak_tflops = peak_tflops
        self._peak_flops: float | None = None  # of one device, per second
        self._step_flops: float | None = None  # over all processes
        self._reports: list[dict[str, float]] = []
        self._busy: deque[Tensor] = deque(maxlen=_MAX_LOG_POINTS)  # (ranks, 2): seconds of work, and of the step
        self._batch_start: float | None  # of the latest batch; None if a pause interrupted it
        self._batch_end: float | None  # of the latest batch; None while it runs and after a pause
        self._reset_timers()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        if stage == "fit" and trainer.is_global_zero:
            self._peak_flops = self.peak_tflops * 1e12 if self.peak_tflops else peak_flops(trainer, pl_module)
            if getattr(pl_module, "takes_batch", False) and hasattr(pl_module, "loss"):
                sample_flops = flops_per_sample(pl_module.net, data.input_shape)
                self._step_flops = sample_flops * data.global_batch_size if sample_flops else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reports = []
        self._busy.clear()

    def on_train_batch_start(self, *_: Any) -> None:
        now = perf_counter()
        if self._batch_end is not None:
            self._gap_seconds += now - self._batch_end
            self._gaps += 1
        self._batch_start, self._batch_end = now, None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_step_complete = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        should_report = is_step_complete and is_log_point(trainer, trainer.global_step)
        if should_report:
            synchronize(pl_module.device)  # the GPU's queue belongs to the steps since the last log point
        self._batch_end = perf_counter()
        if self._batch_start is not None:
            self._batch_seconds += self._batch_end - self._batch_start
            self._batches += 1
        if should_report:
            if trainer.global_step > 1 or trainer.log_every_n_steps == 1:  # the first step is a warm-up
                self._report(trainer, pl_module)
            self._reset_timers()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause(pl_module.device)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._pause(pl_module.device)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._reports and trainer.is_global_zero:
            _log.info("  throughput, the median of %d log points\n%s", len(self._reports), self._summary())
            if slowest := slowest_rank(self._busy):
                _log.info(slowest)

    def _reset_timers(self) -> None:
        """Start a new measurement at the next batch."""
        self._batch_start = self._batch_end = None
        self._batch_seconds = self._gap_seconds = 0.0  # sums over batches, and over the gaps between them
        self._batches = self._gaps = 0

    def _pause(self, device: torch.device) -> None:
        """Continue the measurement at the next batch, without the time until then."""
        if self._batch_start is not None and self._batch_end is not None:
            synchronize(device)  # the GPU's queue belongs to the batch, not to the validation or the checkpoint
            self._batch_seconds += perf_counter() - self._batch_end
        self._batch_start = self._batch_end = None

    def _report(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Report the measurement. Every rank must call it, because the ranks are compared."""
        timeline = next((callback for callback in trainer.callbacks if isinstance(callback, Timeline)), None)
        recorded = timeline.recorded if timeline else None
        ranks = self._compare_ranks(trainer, recorded, peak_memory_mib(module.device))
        report = {"peak_memory_mib": ranks["memory_mib_max"]}
        if self._batches:
            gap = self._gap_seconds / max(1, self._gaps)
            batch = self._batch_seconds / self._batches + gap
            step = batch * trainer.accumulate_grad_batches
            report |= {"samples_per_sec": trainer.datamodule.global_batch_size / step, "step_ms": 1000 * step}
            if self._gaps:  # there are none with a log point at each batch
                report["data_fraction"] = gap / batch
            if self._peak_flops and self._step_flops:
                devices = trainer.num_devices * trainer.num_nodes  # `strategy=dp` has several in one process
                report["mfu"] = self._step_flops / step / devices / self._peak_flops
        # Tensors on the CPU, so that logging them does not wait for the GPU.
        module.log_dict({f"throughput/{name}": torch.tensor(value) for name, value in report.items()})
        if trainer.world_size > 1:
            module.log_dict({f"ranks/{name}": torch.tensor(value) for name, value in ranks.items()})
        self._reports.append(report)

    def _compare_ranks(self, trainer: L.Trainer, recorded: RecordedStep | None, memory_mib: float) -> dict[str, float]:
        """Gather the recorded step and the peak memory of all ranks; return the metrics `ranks/...`."""
        busy, step = (recorded.busy_seconds, recorded.seconds) if recorded else (math.nan, math.nan)
        own = torch.tensor([busy, step, memory_mib], device=trainer.strategy.root_device)
        gathered = trainer.strategy.all_gather(own).view(-1, 3).cpu()
        memory = gathered[:, 2]
        metrics = {"memory_mib_max": float(memory.max()), "memory_mib_min": float(memory.min())}
        if len(gathered) > 1 and not gathered.isnan().any():
            self._busy.append(gathered[:, :2])
            metrics |= _busy_metrics(gathered[:, :2])
        return metrics

    def _summary(self) -> str:
        values = defaultdict(list)
        for report in self._reports:
            for name, value in report.items():
                values[name].append(value)
        rows = {name: median(measured) for name, measured in values.items()}
        if self._step_flops:
            rows["gflop_per_step"] = self._step_flops / 1e9
        return "\n".join(f"    {name:<16}  {value:.4g}" for name, value in rows.items())


def slowest_rank(measured: Iterable[Tensor]) -> str | None:
    """Return a message that names the slowest rank, by the medians of the log points, if others wait for it."""
    steps = list(measured)
    if len(steps) < _MIN_LOG_POINTS:
        return None
    metrics = _busy_metrics(torch.stack(steps).median(0).values)
    if metrics["gain"] < _MIN_GAIN:
        return None
    return (
        f"  rank {metrics['slowest']:.0f} is the slowest: it works {metrics['busy_ms_max']:.1f} ms per step, "
        f"the median rank {metrics['busy_ms_median']:.1f} ms;\n"
        f"  if it were as fast as the median, a step would be {metrics['gain']:.0%} shorter"
    )


def _busy_metrics(measured: Tensor) -> dict[str, float]:
    """Return metrics of the (ranks, 2) seconds of work and of the step; the lower median of an even number of ranks.

    `slowest` is the rank that works longest, and `gain` the fraction of a step that would be saved if it were as fast
    as the median of all ranks.
    """
    busy, step = measured.T
    typical, longest = float(busy.median()), float(busy.max())
    gain = (longest - typical) / float(step.max())
    slowest = float(busy.argmax())
    return {"busy_ms_max": 1000 * longest, "busy_ms_median": 1000 * typical, "slowest": slowest, "gain": gain}
