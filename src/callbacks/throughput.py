"""How fast training goes, what it waits for, and what it takes."""

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
_RSS_BYTES = 1 if sys.platform == "darwin" else 1024  # the unit in which the system tells it


class Throughput(L.Callback):
    """Logs under `throughput/` what the steps since the last log point were like, and says so when training ends.

    `samples_per_sec`: over all processes. `step_ms`: of one optimiser step. `data_share`: the share of it between the
    end of one batch and the start of the next, in which the host fetches, sends and augments it; a GPU may be busy
    meanwhile with what it was given before. `peak_memory_mib`: of the process that took most: its tensors on a GPU,
    elsewhere its resident set. `mfu`: the share of the devices' peak that the network's own operations make
    (Chowdhery et al., "PaLM", 2022), where the peak is known.

    What is neither a batch nor the way to the next one is not counted: validation, checkpoints, the writing of logs.
    The times are those of the host, which waits for a GPU at log points: they are true as sums from one to the next.

    Args:
        peak_tflops: what one device could do in the run's precision, where Lightning does not know or is mistaken.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        self.peak_tflops = peak_tflops
        self._peak: float | None = None  # of one device, per second
        self._flops: float | None = None  # of a step, over all processes
        self._counter: FlopCounterMode | None = None  # of the first batch, if the module has no `loss` to measure
        self._reports: list[dict[str, float]] = []
        self._forget()

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
            _finish(pl_module.device)  # what it has been given belongs to these steps
        self._ended = perf_counter()
        if self._started:
            self._worked += self._ended - self._started
            self._batches += 1
        if self._counter:
            self._count(trainer)
        if at_log_point:
            self._report(trainer, pl_module)
            self._forget()

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

    def _forget(self) -> None:
        """Count anew from the next batch on: what lies between is not counted."""
        self._started = self._ended = 0.0  # when the last batch did
        self._worked = self._waited = 0.0  # seconds
        self._batches = self._gaps = 0

    def _pause(self, device: torch.device) -> None:
        """Count on from the next batch on; this one, if it has begun, is not counted."""
        if self._ended >= self._started > 0.0:
            _finish(device)  # validation, or saving, would wait for it
            self._worked += perf_counter() - self._ended
        self._started = self._ended = 0.0

    def _report(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """All ranks take part, for the sake of the memory."""
        report = {"peak_memory_mib": _peak_memory(trainer, module.device)}
        if self._batches:
            wait = self._waited / max(1, self._gaps)
            batch = self._worked / self._batches + wait
            step = batch * trainer.accumulate_grad_batches
            report |= {"samples_per_sec": trainer.datamodule.global_batch_size / step, "step_ms": 1000 * step}
            if self._gaps:  # none with a log point at each batch
                report["data_share"] = wait / batch
            if self._peak and self._flops:
                report["mfu"] = self._flops / step / trainer.world_size / self._peak
        module.log_dict({f"throughput/{name}": torch.tensor(value) for name, value in report.items()})  # not of the GPU
        self._reports.append(report)

    def _count(self, trainer: L.Trainer) -> None:
        """Every process does as many operations, and every batch."""
        assert self._counter is not None
        self._counter.__exit__(None, None, None)
        self._flops = self._counter.get_total_flops() * trainer.world_size * trainer.accumulate_grad_batches
        self._counter = None

    def _summary(self) -> str:
        names = dict.fromkeys(name for report in self._reports for name in report)
        values = {name: median(report[name] for report in self._reports if name in report) for name in names}
        values["gflop_per_step"] = (self._flops or 0) / 1e9
        return "\n".join(f"    {name:<16}  {value:.4g}" for name, value in values.items())


def _finish(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory(trainer: L.Trainer, device: torch.device) -> float:
    """MiB."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_BYTES
    return float(trainer.strategy.reduce(torch.tensor(peak / 2**20, device=device), reduce_op="max"))
