"""The pictures of docs/guide: what the functions of its chapters return, beside the formulas of the chapters."""

import importlib
import math
import random
import statistics
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from docs.guide.experiment import STEPS_PER_EPOCH, network, run_ranks
from onecurve.extras.report.page import new_figure, series_color

if TYPE_CHECKING:
    import plotly.graph_objects as go

_RING_RANKS = 2  # more would share the cores of a small machine
_LENGTHS = [round(12 * 10 ** (k / 3)) for k in range(17)]  # numbers of 8 bytes
_FITTED = 14  # the tensors up to 2 MB; larger ones take longer than the formula says
_WORK, _MEAN = 10 * 86_400, 54 * 86_400 / 419  # seconds: of training, and between two interruptions as in Llama 3's
_LEGEND = {"orientation": "h", "x": 0.5, "xanchor": "center", "y": 1.02, "yanchor": "bottom"}


def chapter(name: str) -> ModuleType:
    """Import a file of the guide, such as `01_processes.train`."""
    return importlib.import_module(f"docs.guide.{name}")


def ring_figure() -> "go.Figure":
    """Return the time of chapter 1's ring over the bytes, with the latency and the bandwidth that fit best."""
    milliseconds = torch.tensor(run_ranks(ring_milliseconds, _RING_RANKS)[0])
    sizes = 8.0 * torch.tensor(_LENGTHS)
    terms = torch.stack([torch.ones_like(sizes), sizes], 1) / milliseconds[:, None]  # relative errors count alike
    fit = torch.linalg.lstsq(terms[:_FITTED], torch.ones(_FITTED, 1))
    latency, per_byte = fit.solution.flatten().tolist()
    alpha, beta = latency / 2 / (_RING_RANKS - 1) * 1000, 2 * (_RING_RANKS - 1) / _RING_RANKS / per_byte / 1e6
    figure = new_figure(380, legend=_LEGEND)
    name = f"2(N-1)(α + n/(Nβ)) with N = {_RING_RANKS}, α = {alpha:.0f} µs, β = {beta:.1f} GB/s"
    grid = torch.logspace(math.log10(sizes[0]), math.log10(sizes[-1]), 100)
    _add(figure, name, grid.tolist(), (latency + grid * per_byte).tolist(), 0)
    _add(figure, "measured", sizes.tolist(), milliseconds.tolist(), 0, mode="markers")
    _add(figure, "latency alone", grid.tolist(), [latency] * len(grid), 8, dash="dot")
    _add(figure, "transfer alone", grid.tolist(), (grid * per_byte).tolist(), 2, dash="dot")
    name = f"equal at n = Nαβ = {latency / per_byte / 1000:.0f} kB"
    _add(figure, name, [latency / per_byte], [latency], 1, mode="markers", symbol="diamond")
    ticks = _ticks({100: "100 B", 1e3: "1 kB", 1e4: "10 kB", 1e5: "100 kB", 1e6: "1 MB", 1e7: "10 MB"})
    figure.update_layout(xaxis=ticks | {"type": "log", "title": "size n of the tensor"})
    ticks = _ticks({value: f"{value:g} ms" for value in (0.01, 0.1, 1, 10, 100)})
    lowest, highest = math.log10(latency / 5), math.log10(2 * milliseconds.max())
    figure.update_layout(yaxis=ticks | {"type": "log", "range": [lowest, highest]})
    return figure


def ring_milliseconds() -> list[float]:
    """Return the time of chapter 1's ring for each length: the least of many, as other programs share the cores."""
    ring, least = chapter("01_processes.train").ring_all_reduce, []
    for length in _LENGTHS:
        tensor, seconds = torch.zeros(length, dtype=torch.float64), []
        for _ in range(min(200, 10 + 20_000_000 // length)):
            dist.barrier()
            start = time.perf_counter()
            ring(tensor)
            seconds.append(time.perf_counter() - start)
        least.append(1000 * min(seconds))
    return least


def set_epoch_figure() -> "go.Figure":
    """Return the training losses of chapter 2's script with and without `set_epoch`."""
    figure, script = new_figure(340, legend=_LEGEND), chapter("02_samplers.train")
    for color, name, bug in ((1, "without set_epoch", "no_set_epoch"), (0, "with set_epoch", "")):
        losses, test_loss, *_ = run_ranks(script.run_rank, script.RANKS, bug)[0]
        steps = list(range(1, len(losses) + 1))
        name = f"{name}: test loss {test_loss:.3f}"
        _add(figure, name, steps, losses, color, mode="lines+markers", width=2 + 3 * color)
    for step in range(STEPS_PER_EPOCH, len(steps), STEPS_PER_EPOCH):
        figure.add_vline(step + 0.5, line={"color": "var(--muted)", "width": 1, "dash": "dot"})
    figure.update_layout(xaxis={"title": "optimizer step; dotted: a new epoch", "range": [0.5, len(steps) + 0.5]})
    figure.update_layout(yaxis={"title": "training loss"})
    return figure


def memory_figure() -> "go.Figure":
    """Return the bytes that chapter 7's memory.py counts on the fullest rank, and the bytes of even shards."""
    figure, ranks = new_figure(360, legend=_LEGEND), [1, 2, 4, 8]
    kilobytes = 32 * sum(weight.numel() for weight in network().parameters()) / 1000  # AdamW in float64
    formulas = {"DDP": "32Ψ", "ZeRO-1": "16Ψ + 16Ψ/N", "fully_shard": "32Ψ/N"}
    for color, (variant, formula) in enumerate(formulas.items()):
        even = [kilobytes * (1 - color / 2 + color / 2 / count) for count in ranks]
        _add(figure, f"{variant}: {formula}", ranks, even, color, dash="dot")
        held = [run_ranks(chapter("07_sharding.memory").measure, count, variant) for count in ranks]
        _add(figure, "measured", ranks, [max(map(sum, one)) / 1000 for one in held], color, mode="markers")
    figure.update_layout(xaxis=_ticks({count: str(count) for count in ranks}) | {"type": "log", "title": "processes N"})
    figure.update_layout(yaxis={"title": "kB on the fullest process", "rangemode": "tozero"})
    return figure


def interval_figure() -> "go.Figure":
    """Return the lost time over the checkpoint interval: the formula of chapter 11, and runs of its exercise 1."""
    figure, finish_time = new_figure(380, legend=_LEGEND), chapter("11_resume.solutions").finish_time
    minutes = [180 ** (k / 100) for k in range(101)]
    for color, save in enumerate((60, 5)):
        lost = [100 * (save / tau + tau / 2 / _MEAN) for tau in (60 * one for one in minutes)]
        _add(figure, f"δ = {save} s: δ/τ + τ/2M", minutes, lost, color)
        runs = [[finish_time(_WORK, 60 * one, save, _kills(seed)) for seed in range(5)] for one in minutes[::8]]
        means = [100 * (statistics.mean(ends) / _WORK - 1) for ends in runs]
        _add(figure, "simulated", minutes[::8], means, color, mode="markers")
        best, least = math.sqrt(2 * save * _MEAN) / 60, 100 * math.sqrt(2 * save / _MEAN)
        name = f"√(2δM) = {best:.1f} minutes"
        _add(figure, name, [best], [least], color, mode="markers", symbol="diamond")
    ticks = _ticks({1: "1 minute"} | {count: str(count) for count in (2, 5, 10, 20, 60, 180)})
    figure.update_layout(xaxis=ticks | {"type": "log", "title": "interval τ between two checkpoints"})
    figure.update_layout(yaxis={"title": "lost, % of the training time", "range": [0, 50]})
    return figure


def _kills(seed: int) -> list[float]:
    generator, times = random.Random(seed), [0.0]
    while times[-1] < 3 * _WORK:
        times.append(times[-1] + generator.expovariate(1 / _MEAN))
    return times[1:]


def _add(figure: "go.Figure", name: str, x: Any, y: Any, color: int, mode: str = "lines", **style: Any) -> None:
    """Add a curve. `style` has the `dash` and the `width` of its line, or the `symbol` of its points."""
    symbol = style.pop("symbol", "circle")
    marker = {"color": series_color(color), "size": 13 if symbol == "diamond" else 8, "symbol": symbol}
    line = {"color": series_color(color), "width": 2} | style
    figure.add_scatter(x=x, y=y, name=name, mode=mode, line=line, marker=marker)


def _ticks(labels: dict[Any, str]) -> dict[str, Any]:
    return {"tickvals": list(labels), "ticktext": list(labels.values())}


FIGURES = {
    "ring_all_reduce": (ring_figure, "Time of a ring all-reduce over the bytes of the tensor, measured and fitted"),
    "set_epoch": (set_epoch_figure, "Training loss of 20 steps with and without sampler.set_epoch(epoch)"),
    "sharded_memory": (memory_figure, "Memory of the fullest of 1 to 8 processes under DDP, ZeRO-1 and FSDP"),
    "checkpoint_interval": (interval_figure, "Time that a run loses, over the interval between its checkpoints"),
}
