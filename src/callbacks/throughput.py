"""Measure training speed, data-loading time and peak memory."""

import logging
import resource
import sys
from statistics import median
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch.utils.flop_counter import FlopCounterMode

from src.models.flops import flops_per_sample, peak_flops

_log = logging.getLogger(__name__)
_RSS_BYTES = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss


class Throughput(L.Callback):
    """Logs the speed of the steps since the last log point under `throughput/`, and a summary when training ends.

    `samples_per_sec`: images per second over all processes. `step_ms`: milliseconds of one optimizer step.
    `data_fraction`: fraction of a step between the end of a batch and the start of the next, in which the host fetches,
    transfers and augments data. `peak_memory_mib`: largest memory of any process: allocated tensors on a GPU, resident
    set size on a CPU. `mfu`: model FLOPs utilization (Chowdhery et al., "PaLM", 2022), if the device's peak is known.

    Validation, checkpoints and logging are not counted. Times are host times, and exact only over the interval between
    two log points, where the host waits for the GPU.

    Args:
        peak_tflops: peak of one device in the run's precision, where Lightning does not know it or is mistaken.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        self.peak_tflops = peak_tflops
        self._peak: float | None = None  # of one device, per second
        self._flops: float | None = None  # of a step, over all processes
        self._counter: FlopCounterMode | None = None  # of the first batch, if the module has no `loss` to measure
        self._reports: list[dict[str, float]] = []
        self._reset_timers()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        if stage == "fit" and trainer.is_global_zero:
            self._peak = self.peak_tflops * 1e12 if self.peak_tflops else peak_flops(trainer, pl_module.device)
            if hasattr(pl_module, "loss"):
                self._flops = flops_per_sample(pl_module, data.image_shape) * data.global_batch_size

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reports = []
        if trainer.is_global_zero and self._flops is None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_train_batch_start(self, *_: Any) -> None:
        self._started = perf_counter()
        if self._ended:
            self._waited += self._started - self._ended
            self._gaps += 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        whole = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        at_log_point = whole and trainer.global_step % trainer.log_every_n_steps == 0
        if at_log_point:
            _synchronize(pl_module.device)  # what it has been given belongs to these steps
        self._ended = perf_counter()
        if self._started:
            self._worked += self._ended - self._started
            self._batches += 1
        if self._counter:
            self._estimate_step_flops(trainer)
        if at_log_point:
            self._report(trainer, pl_module)
            self._reset_timers()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause(pl_module.device)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._pause(pl_module.device)

    def on_exception(self, *_: Any) -> None:
        if self._counter:
            self._counter.__exit__(None, None, None)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._reports and trainer.is_global_zero:
            _log.info("  throughput, the median of %d log points\n%s", len(self._reports), self._summary())

    def _reset_timers(self) -> None:
        """Start a new measurement at the next batch."""
        self._started = self._ended = 0.0  # when the last batch did
        self._worked = self._waited = 0.0  # seconds
        self._batches = self._gaps = 0

    def _pause(self, device: torch.device) -> None:
        """Continue the measurement at the next batch; leave out the time until then."""
        if self._ended >= self._started > 0.0:
            _synchronize(device)  # validation, or saving, would wait for it
            self._worked += perf_counter() - self._ended
        self._started = self._ended = 0.0

    def _report(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Report the measurement. Every rank must call it, because the memory is reduced over ranks."""
        report = {"peak_memory_mib": _peak_memory(trainer, module.device)}
        if self._batches:
            wait = self._waited / max(1, self._gaps)
            batch = self._worked / self._batches + wait
            step = batch * trainer.accumulate_grad_batches
            report |= {"samples_per_sec": trainer.datamodule.global_batch_size / step, "step_ms": 1000 * step}
            if self._gaps:  # none with a log point at each batch
                report["data_fraction"] = wait / batch
            if self._peak and self._flops:
                report["mfu"] = self._flops / step / trainer.world_size / self._peak
        module.log_dict(
            {f"throughput/{name}": torch.tensor(value) for name, value in report.items()}
        )  # tensors on the CPU, so that logging them does not wait for the GPU
        self._reports.append(report)

    def _estimate_step_flops(self, trainer: L.Trainer) -> None:
        """Extrapolate the first batch's FLOPs to a step: every process and every micro-batch costs the same."""
        assert self._counter is not None
        self._counter.__exit__(None, None, None)
        self._flops = self._counter.get_total_flops() * trainer.world_size * trainer.accumulate_grad_batches
        self._counter = None

    def _summary(self) -> str:
        names = dict.fromkeys(name for report in self._reports for name in report)
        values = {name: median(report[name] for report in self._reports if name in report) for name in names}
        values["gflop_per_step"] = (self._flops or 0) / 1e9
        return "\n".join(f"    {name:<16}  {value:.4g}" for name, value in values.items())


def _synchronize(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory(trainer: L.Trainer, device: torch.device) -> float:
    """Return the largest peak memory of any rank in MiB."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_BYTES
    return float(trainer.strategy.reduce(torch.tensor(peak / 2**20, device=device), reduce_op="max"))
