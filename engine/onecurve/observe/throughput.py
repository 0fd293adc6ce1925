"""Measure training speed, data-loading time, FLOPs and peak memory, and compare the ranks."""

import copy
import logging
import math
import warnings
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops, measure_flops
from torch import Tensor, nn

from onecurve.network.net import network_of
from onecurve.network.precision import dtype_name
from onecurve.observe.step_times import RecordedStep
from onecurve.observe.steps import is_log_point, trained_steps
from onecurve.observe.timeline import Timeline
from onecurve.patches.torch import tree_leaves
from onecurve.process.devices import peak_memory_mib

_log = logging.getLogger(__name__)
_MIN_GAIN = 0.05  # fraction of a step; below it, ranks differ by chance
_MIN_LOG_POINTS = 3
_MAX_LOG_POINTS = 1000  # the newest ones: 100,000 of 64 ranks would take 200 MiB in each process
_NUM_SAMPLES = 2  # whose FLOPs are counted; batch normalization needs more than one


class Throughput(L.Callback):
    """Logs the speed of the steps since the last log point under `throughput/`, and a summary when training ends.

    `samples_per_sec`: samples per second over all processes. `step_ms`: milliseconds of one optimizer step.
    `data_fraction`: fraction of a step for fetching, transferring and augmenting data. `peak_memory_mib`: largest
    memory of any process: allocated tensors on a GPU, resident set size on a CPU. `mfu`: model FLOPs utilization
    (Chowdhery et al., "PaLM", 2022), if the device's peak is known and the module has a method `loss`, which a
    GAN has not.

    With several processes, `ranks/` has their memory and the time for which they work in a step; training ends with a
    message about a rank for which the others wait. Ranks that train in lockstep take equally long for a step, because
    the fast ones wait for the slow ones in collectives. A slow rank is therefore found by its busy time, the time of a
    step in which it does not wait.

    `callbacks.timeline` measures the times, without validation and checkpoints, and must stand before this callback;
    without it, only the memory is logged.

    Args:
        peak_tflops: peak TFLOP/s of one device in the run's precision, if Lightning's figure is missing or wrong.
        planned_step_ms: milliseconds of a step in the run's plan, which are logged beside those of the run.
    """

    def __init__(self, peak_tflops: float | None = None, planned_step_ms: float | None = None) -> None:
        self.peak_tflops, self.planned_step_ms = peak_tflops, planned_step_ms
        self._peak_flops: float | None = None  # of one device, per second
        self._step_flops: float | None = None  # over all processes
        self._reports: list[dict[str, float]] = []
        self._busy: deque[Tensor] = deque(maxlen=_MAX_LOG_POINTS)  # (ranks, 2): seconds of work, and of the step

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        if stage == "fit" and trainer.is_global_zero:
            self._peak_flops = self.peak_tflops * 1e12 if self.peak_tflops else peak_flops(trainer, pl_module)
            net = network_of(pl_module)
            if net is not None and getattr(pl_module, "takes_batch", False) and hasattr(pl_module, "loss"):
                sample = tree_leaves(data.example_batch(1)[0].batch)[0]
                sample_flops = flops_per_sample(net, sample.shape[1:])
                self._step_flops = sample_flops * data.global_batch_size if sample_flops else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reports = []
        self._busy.clear()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        step = trained_steps(trainer)
        is_warm_up = step == 1 < trainer.log_every_n_steps
        if is_log_point(trainer, step) and not is_warm_up:
            self._report(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._reports and trainer.is_global_zero:
            _log.info("  throughput, the median of %d log points\n%s", len(self._reports), self._summary())
            if slowest := slowest_rank(self._busy):
                _log.info(slowest)

    def _report(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Report the measurement. Every rank must call it, because the ranks are compared."""
        timeline = next((callback for callback in trainer.callbacks if isinstance(callback, Timeline)), None)
        recorded, step = (timeline.recorded, timeline.step_seconds) if timeline else (None, None)
        ranks = self._compare_ranks(trainer, recorded, peak_memory_mib(module.device))
        report = {"peak_memory_mib": ranks["memory_mib_max"]}
        if step:
            report |= {"samples_per_sec": trainer.datamodule.global_batch_size / step, "step_ms": 1000 * step}
            if self._peak_flops and self._step_flops:
                devices = trainer.num_devices * trainer.num_nodes  # `strategy=dp` has several in one process
                report["mfu"] = self._step_flops / step / devices / self._peak_flops
        if self.planned_step_ms:
            report["planned_step_ms"] = self.planned_step_ms
        if recorded and recorded.spans.get("data"):  # a save may have interrupted the recording
            report["data_fraction"] = recorded.spans["data"] / recorded.seconds
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
        names = dict.fromkeys(name for report in self._reports for name in report)
        rows = {name: median(report[name] for report in self._reports if name in report) for name in names}
        if self._step_flops:
            rows["gflop_per_step"] = self._step_flops / 1e9
        return "\n".join(f"    {name:<16}  {value:.4g}" for name, value in rows.items())


def flops_per_sample(net: Any, input_shape: tuple[int, ...]) -> float | None:
    """Return the FLOPs per training sample of a network, or None if that fails, such as where it reads values.

    A copy with tensors of the meta device computes nothing, and leaves weights, buffers and random generators alone.
    The network must be neither sharded, split nor compiled.
    """
    weights = list(net.parameters())
    meta = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in (*weights, *net.buffers())}
    for weight in weights:
        meta[id(weight)].requires_grad_(weight.requires_grad)
    inputs = torch.empty(_NUM_SAMPLES, *input_shape, dtype=weights[0].dtype, device="meta")
    try:
        return measure_flops(net, lambda: copy.deepcopy(net, meta)(inputs), _total) / _NUM_SAMPLES
    except Exception:  # meta tensors have no values; an error of the network itself comes again when it trains
        return None


def _total(outputs: Any) -> Tensor:
    return torch.stack([one.sum() for one in tree_leaves(outputs) if isinstance(one, Tensor)]).sum()


def peak_flops(trainer: L.Trainer, module: L.LightningModule) -> float | None:
    """Return the peak FLOP/s of a device in the precision of the run, or None if Lightning lists none.

    cuDNN convolves float32 in TF32 by default, but matrix products are exact by default.
    """
    name = dtype_name(trainer.precision)
    if name is None:
        return None
    dtype = getattr(torch, name)
    convolves = any(isinstance(part, nn.Conv2d) for part in module.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns if it does not list the device
        if dtype is torch.float32 and convolves and torch.backends.cudnn.allow_tf32:
            return get_available_flops(module.device, "tfloat32") or get_available_flops(module.device, dtype)
        return get_available_flops(module.device, dtype)


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
