"""Save a workspace of a W&B project, with the charts of this template.

It has the sections Learning, Speed, Memory, Ranks, Images and Sweep. Each call saves a new one.
`pip install '.[dashboard]'` brings the package.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from onecurve.errors import UserError, suggest

try:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr
except ImportError:
    sys.exit("error: this needs wandb-workspaces: pip install '.[dashboard]'")

_OPTIONS = ["optimizer.lr", "optimizer.weight_decay", "data.batch_size", "seed"]
_STRATEGY, _BEST = wr.Config("runtime.strategy"), wr.SummaryMetric("val/acc.max")
_STEP = "trainer/global_step"
# W&B keeps the values of each top-level key of a configuration below `value`.
_CONFIG_COLUMNS = ["config:runtime.value.strategy", "config:global_batch_size.value"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", metavar="ENTITY/PROJECT", help="a W&B project of a user or a team")
    parser.add_argument("--dry-run", action="store_true", help="print the JSON instead; this needs no account")
    parser.add_argument("--options", nargs="+", default=_OPTIONS, help="options of sweeps; default: %(default)s")
    arguments = parser.parse_args()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", arguments.project):
        sys.exit(f"error: {arguments.project}: give ENTITY/PROJECT, such as my-team/cifar")
    entity, _, project = arguments.project.partition("/")
    workspace = build_workspace(entity, project, arguments.options)
    if arguments.dry_run:
        spec = workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
        print(json.dumps(json.loads(spec), indent=1))
        return
    try:
        _check_project(entity, project)
    except UserError as error:
        sys.exit(f"error: {error}")
    workspace.save()
    print(workspace.url)


def _check_project(entity: str, project: str) -> None:
    """Check that there is a key, a connection, and the project."""
    os.environ.setdefault("WANDB_SILENT", "true")  # wandb would print the account, and more
    import wandb

    try:
        if not wandb.login(prompt=False, verify=False):
            raise UserError("no W&B API key is configured: run `wandb login`, or set WANDB_API_KEY")
        names = [found.name for found in wandb.Api().projects(entity)]
    except UserError:
        raise
    except Exception as error:  # of wandb, its service or the network
        reason = " ".join(str(error).split())
        raise UserError(f"{entity}/{project}: W&B cannot list the projects of {entity} ({reason})") from None
    if project not in names:
        hint = suggest(project, names) if names else "it has none, or there is no such entity"
        raise UserError(f"{entity}/{project}: {entity} has no project {project}; {hint}")


def build_workspace(entity: str, project: str, options: Sequence[str]) -> Any:
    """Return the workspace.

    Args:
        entity: a user or a team of W&B.
        project: the project.
        options: dotted names of the options that sweeps vary.
    """
    contents = {
        "Learning": learning(),
        "Speed": speed(),
        "Memory": memory(),
        "Ranks": ranks(),
        "Images": [wr.MediaBrowser(title="images/samples", media_keys=["images/samples"], num_columns=4)],
        "Sweep": sweep(options),
    }
    for name, charts in contents.items():
        for number, chart in enumerate(charts):
            chart._id = f"{name}-{number}"  # in place of a random one, so that the same pages are saved each time
    sections = [ws.Section(name, charts, is_open=True) for name, charts in contents.items()]
    is_training = expr.Metric("JobType") == "train"  # evaluations and predictions are runs of their own
    columns = ["summary:val/acc.max", "summary:test/acc", *_CONFIG_COLUMNS]
    runs = ws.RunsetSettings(filters=[is_training], pinned_columns=columns)
    settings = ws.WorkspaceSettings(x_axis=_STEP, max_runs=20)
    return ws.Workspace(entity, project, "Training", sections, settings, runs)


def learning() -> list[Any]:
    """Return the curves by strategy: the mean over the runs of a strategy, and the range of their values."""
    names = ("train/loss", "val/loss", "train/acc", "val/acc")
    return [
        *(_by_strategy(name) for name in names),
        wr.BarPlot(title="test/acc by strategy", metrics=["test/acc"], groupby=_STRATEGY, groupby_rangefunc="minmax"),
        _lines("lr"),
        _lines("optim/grad_norm", log_y=True),
    ]


def speed() -> list[Any]:
    """Return throughput and time per step."""
    images = "throughput/samples_per_sec"
    return [
        wr.BarPlot(title="images per second by strategy", metrics=[images], groupby=_STRATEGY, groupby_aggfunc="mean"),
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


def sweep(options: Sequence[str]) -> list[Any]:
    """Return how the best validation accuracy depends on the options.

    Args:
        options: dotted names of options.
    """
    columns = [wr.ParallelCoordinatesPlotColumn(wr.Config(name)) for name in options]
    return [
        wr.ParallelCoordinatesPlot(
            title="options and the best val/acc", columns=[*columns, wr.ParallelCoordinatesPlotColumn(_BEST)]
        ),
        wr.ParameterImportancePlot(with_respect_to=_BEST.name),
        *(wr.ScatterPlot(title=f"val/acc over {name}", x=wr.Config(name), y=_BEST) for name in options),
    ]


def _by_strategy(name: str) -> Any:
    title = f"{name} by strategy"
    return wr.LinePlot(
        title=title, x=_STEP, y=[name], groupby=_STRATEGY, groupby_aggfunc="mean", groupby_rangefunc="minmax"
    )


def _lines(*names: str, title: str | None = None, log_y: bool | None = None) -> Any:
    return wr.LinePlot(title=title or names[0], x=_STEP, y=list(names), log_y=log_y)


def _system(name: str, title: str) -> Any:
    """Return the lines of a system metric."""
    pattern = "system[./]" + name.replace(".", r"\.").replace(r"\.*", r"\.[0-9]+")
    return wr.LinePlot(title=title, x="RelativeTime(Process)", metric_regex=pattern)


if __name__ == "__main__":
    main()
