"""The workspace and the report of a W&B project."""

from collections.abc import Iterable, Sequence
from typing import Any

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces import expr

from scripts.dashboard import panels

_IMAGES = ("images/samples",)
_TRAINING = expr.Metric("JobType") == "train"  # evaluations and predictions are runs of their own
# W&B keeps the values of each top-level key of a configuration below `value`.
_STRATEGY, _BATCH, _SWEEP = "runtime.value.strategy", "global_batch_size.value", "runtime.value.sweep_id"
_COLUMNS = ["summary:val/acc.max", "summary:test/acc", f"config:{_STRATEGY}", f"config:{_BATCH}"]
_WIDTH, _HEIGHT = 24, 8  # of a row of charts, in units of a report's grid


def build_workspace(entity: str, project: str, options: Sequence[str]) -> Any:
    """Return the workspace.

    Args:
        entity: a user or a team of W&B.
        project: the project.
        options: dotted names of the options that sweeps vary.
    """
    contents = {
        "Learning": panels.learning(),
        "Speed": panels.speed(),
        "Memory": panels.memory(),
        "Ranks": panels.ranks(),
        "Images": panels.images(_IMAGES),
        "Sweep": panels.sweep(options),
    }
    sections = [ws.Section(name, _named(name, content), is_open=True) for name, content in contents.items()]
    runs = ws.RunsetSettings(filters=[_TRAINING], pinned_columns=list(_COLUMNS))
    settings = ws.WorkspaceSettings(x_axis="trainer/global_step", max_runs=20)
    return ws.Workspace(entity, project, "Training", sections, settings, runs)


def build_report(entity: str, project: str, options: Sequence[str], batch_size: int) -> Any:
    """Return the report: strategies, ranks, sweeps, and strategies at equal global batch.

    Args:
        entity: a user or a team of W&B.
        project: the project.
        options: dotted names of the options that sweeps vary.
        batch_size: global batch size of the runs that the last part compares.
    """
    equal = expr.Config(_BATCH) == batch_size
    in_sweep = expr.Config(_SWEEP) != None  # noqa: E711, the package makes a filter of it
    blocks = [
        wr.TableOfContents(),
        *_part("Curves by strategy", "Each line is the mean of a strategy's runs.", panels.learning(), []),
        *_part("Throughput and memory per rank", _RANKS, [*panels.speed(), *panels.memory(), *panels.ranks()], []),
        *_part("Sweeps", "Group the runs by `Group` to see one sweep.", panels.sweep(options), [in_sweep]),
        *_part(f"Equal global batch of {batch_size}", _EQUAL, [*panels.learning()[:4], *panels.speed()[:2]], [equal]),
    ]
    return wr.Report(project, entity, "Strategies compared", "Made by scripts.dashboard.", blocks, "fluid")


_RANKS = "The system metrics are those of the host of rank zero."
_EQUAL = "Strategies and numbers of ranks differ in these runs, the batch of the optimizer does not: the curves agree."


def _part(title: str, text: str, content: Sequence[Any], filters: Sequence[Any]) -> list[Any]:
    """Return a heading, a paragraph and a grid of charts."""
    runs = wr.Runset(name=title, filters=[_TRAINING, *filters])  # of the project of the report
    runs._id = title
    charts = list(_named(title, content))
    for number, chart in enumerate(charts):
        row, column = divmod(number, 2)
        chart.layout = wr.Layout(x=column * _WIDTH // 2, y=row * _HEIGHT, w=_WIDTH // 2, h=_HEIGHT)
    return [wr.H1(title), wr.P(text), wr.PanelGrid(runsets=[runs], panels=charts)]


def _named(section: str, content: Iterable[Any]) -> list[Any]:
    """Give each chart an id of its own, in place of a random one, so that the same pages are saved each time."""
    charts = list(content)
    for number, chart in enumerate(charts):
        chart._id = f"{section}-{number}"
    return charts
