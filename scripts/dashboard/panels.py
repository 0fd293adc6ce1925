"""The charts of the workspace and of the report, by subject."""

from collections.abc import Sequence
from typing import Any

import wandb_workspaces.reports.v2 as wr

STRATEGY = wr.Config("runtime.strategy")
BEST = wr.SummaryMetric("val/acc.max")
_STEP = "trainer/global_step"


def learning() -> list[Any]:
    """Return the curves by strategy: the mean over the runs of a strategy, and the range of their values."""
    names = ("train/loss", "val/loss", "train/acc", "val/acc")
    return [
        *(_by_strategy(name) for name in names),
        wr.BarPlot(title="test/acc by strategy", metrics=["test/acc"], groupby=STRATEGY, groupby_rangefunc="minmax"),
        _lines("lr"),
        _lines("optim/grad_norm", log_y=True),
    ]


def speed() -> list[Any]:
    """Return throughput and time per step."""
    images = "throughput/samples_per_sec"
    return [
        wr.BarPlot(title="images per second by strategy", metrics=[images], groupby=STRATEGY, groupby_aggfunc="mean"),
        _by_strategy(images),
        _lines("throughput/step_ms"),
        _lines("throughput/data_fraction"),
        _lines("throughput/mfu"),
    ]


def memory() -> list[Any]:
    """Return the peak memory, and on the host of rank zero the memory of its process and of each GPU."""
    return [
        _by_strategy("throughput/peak_memory_mib"),
        _lines("ranks/memory_mib_max", "ranks/memory_mib_min", title="largest and smallest peak memory of a rank, MiB"),
        _system("proc.memory.rssMB", "memory of rank zero's process, MB"),
        _system("gpu.*.memoryAllocatedBytes", "memory of each GPU, bytes"),
    ]


def ranks() -> list[Any]:
    """Return the differences between ranks, and the use of CPU and GPUs on the host of rank zero."""
    return [
        _lines("ranks/busy_ms_max", "ranks/busy_ms_median", title="busy time of the slowest and the median rank, ms"),
        _lines("ranks/slowest", title="number of the slowest rank"),
        _lines("ranks/gain", title="gain if the slowest rank were as fast as the median"),
        _system("cpu", "CPU of rank zero's process, %"),
        _system("gpu.*.gpu", "utilization of each GPU, %"),
    ]


def images(names: Sequence[str]) -> list[Any]:
    """Return a gallery per key of logged images."""
    return [wr.MediaBrowser(title=name, media_keys=[name], num_columns=4) for name in names]


def sweep(options: Sequence[str]) -> list[Any]:
    """Return how the best validation accuracy depends on the options.

    Args:
        options: dotted names of options.
    """
    columns = [wr.ParallelCoordinatesPlotColumn(wr.Config(name)) for name in options]
    return [
        wr.ParallelCoordinatesPlot(
            title="options and the best val/acc", columns=[*columns, wr.ParallelCoordinatesPlotColumn(BEST)]
        ),
        wr.ParameterImportancePlot(with_respect_to=BEST.name),
        *(wr.ScatterPlot(title=f"val/acc over {name}", x=wr.Config(name), y=BEST) for name in options),
    ]


def _by_strategy(name: str) -> Any:
    title = f"{name} by strategy"
    return wr.LinePlot(
        title=title, x=_STEP, y=[name], groupby=STRATEGY, groupby_aggfunc="mean", groupby_rangefunc="minmax"
    )


def _lines(*names: str, title: str | None = None, log_y: bool | None = None) -> Any:
    return wr.LinePlot(title=title or names[0], x=_STEP, y=list(names), log_y=log_y)


def _system(name: str, title: str) -> Any:
    """Return the lines of a system metric."""
    pattern = "system[./]" + name.replace(".", r"\.").replace(r"\.*", r"\.[0-9]+")
    return wr.LinePlot(title=title, x="RelativeTime(Process)", metric_regex=pattern)
