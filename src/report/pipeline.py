"""The passes of a pipeline in one step: as simulated, and as recorded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from src.report.figure import new_figure
from src.report.markup import Html, chart
from src.report.run_folder import RankTimeline, RunFolder

if TYPE_CHECKING:
    import plotly.graph_objects as go

_KINDS = {
    "F": ("forward", "var(--forward)"),
    "B": ("backward", "var(--backward)"),
    "I": ("gradients of the inputs", "var(--input-gradient)"),
    "W": ("gradients of the weights", "var(--weight-gradient)"),
}
_MOST_ROWS = 16  # ranks in the chart


class Pass(NamedTuple):
    """One pass of a micro-batch through a stage; `kind` is F, B, I or W, and times are since the step's start."""

    stage: int
    microbatch: int
    kind: str
    start: float
    end: float


Rows = dict[int, list[Pass]]  # the passes of each rank


def pipeline_charts(run: RunFolder) -> list[Html]:
    """Return the charts of the schedule: simulated above, the newest recorded step below."""
    step, rows = recorded_passes(run.timelines)
    if not rows:
        return []
    note = f"Step {step:,}. {_bubble_sentence(rows)}"
    recorded = passes_chart(rows, "Recorded", note, "milliseconds since the start of the step", scale=1000)
    return [*_simulated_chart(run, rows), recorded]


def _simulated_chart(run: RunFolder, recorded: Rows) -> list[Html]:
    """Return the chart of the schedule as simulated for the recorded ranks; nothing if its name is not known."""
    from src.strategies.pipeline.schedules import SCHEDULES  # late, because it imports torch's pipelines
    from src.strategies.pipeline.simulation import simulate

    name = run.config.get("strategy.schedule")
    if name not in SCHEDULES:
        return []
    passes = [one for rank in recorded.values() for one in rank]
    ranks = (1 + max(one.stage for one in passes)) // SCHEDULES[name].stages_per_rank
    timeline = simulate(name, ranks, microbatches=1 + max(one.microbatch for one in passes))
    rows = {rank: [Pass(*one) for one in passes] for rank, passes in enumerate(timeline)}
    note = f"{name}, with stages of equal cost and sending without cost. {_bubble_sentence(rows)}"
    return [passes_chart(rows, "Simulated", note, "duration of a forward pass")]


def recorded_passes(timelines: list[RankTimeline]) -> tuple[int, Rows]:
    """Return the newest step that most ranks have recorded, and its passes in seconds since the first one."""
    steps = [record["step"] for timeline in timelines for record in timeline.passes]
    if not steps:
        return 0, {}
    most = max(steps.count(step) for step in set(steps))
    newest = max(step for step in set(steps) if steps.count(step) == most)
    lines = {
        timeline.rank: record
        for timeline in timelines[:_MOST_ROWS]
        for record in timeline.passes
        if record["step"] == newest
    }
    origin = min(float(record.get("start") or 0.0) for record in lines.values())
    rows = {rank: _passes(record, origin) for rank, record in lines.items()}
    first = min(one.start for passes in rows.values() for one in passes)
    return newest, {
        rank: [one._replace(start=one.start - first, end=one.end - first) for one in passes]
        for rank, passes in rows.items()
    }


def _passes(record: dict[str, Any], origin: float) -> list[Pass]:
    """Return the passes of one line in seconds since the UNIX time `origin`; its own times count from its `start`."""
    offset = float(record.get("start") or 0.0) - origin
    return [
        Pass(int(stage), int(microbatch), str(kind), offset + start, offset + end)
        for stage, microbatch, kind, start, end in record["passes"]
    ]


def bubble(rows: Rows) -> float:
    """Return the fraction of the step in which the ranks idle on average."""
    total = len(rows) * max(one.end for passes in rows.values() for one in passes)
    busy = sum(one.end - one.start for passes in rows.values() for one in passes)
    return (total - busy) / total if total else 0.0


def _bubble_sentence(rows: Rows) -> str:
    return f"The ranks idle {bubble(rows):.1%} of the step (shaded)."


def passes_chart(rows: Rows, title: str, note: str, unit: str, scale: float = 1.0) -> Html:
    """Return the chart of the passes, a row per rank; what no pass covers is the bubble.

    Args:
        rows: the passes of each rank.
        title: the chart's title.
        note: the sentence below it.
        unit: the title of the time axis.
        scale: factor from the times of the passes to that unit.
    """
    figure = new_figure(70 + 40 * len(rows), barmode="overlay", hovermode="closest")
    end = scale * max(one.end for passes in rows.values() for one in passes)
    names = {rank: f"rank {rank}" for rank in rows}
    figure.add_bar(
        x=[end] * len(rows),
        y=list(names.values()),
        orientation="h",
        name="bubble",
        marker={"color": "var(--bubble)", "line": {"width": 0}},
        hoverinfo="skip",
    )
    last_stage = max(one.stage for passes in rows.values() for one in passes)
    for kind, (label, color) in _KINDS.items():
        chosen = [(names[rank], one) for rank, passes in rows.items() for one in passes if one.kind == kind]
        if chosen:
            _add_passes(figure, label, color, chosen, scale, last_stage // len(rows))
    figure.update_xaxes(title=unit, range=[0, end], showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    figure.update_layout(bargap=0.18, uniformtext={"minsize": 8, "mode": "hide"})
    return chart(figure, title, note, wide=True, min_width=640)


def _add_passes(
    figure: "go.Figure", label: str, color: str, chosen: Sequence[tuple[str, Pass]], scale: float, chunks: int
) -> None:
    """Add the passes of one kind. The later stages of a rank that has several are paler."""
    ranks = len({name for name, _ in chosen})
    figure.add_bar(
        x=[scale * (one.end - one.start) for _, one in chosen],
        y=[name for name, _ in chosen],
        base=[scale * one.start for _, one in chosen],
        orientation="h",
        name=label,
        marker={
            "color": color,
            "opacity": [0.7 if chunks and one.stage >= ranks else 1.0 for _, one in chosen],
            "line": {"width": 1, "color": "var(--card)"},
        },
        text=[one.microbatch for _, one in chosen],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": "var(--on-pass)", "size": 11},
        constraintext="inside",
        customdata=[(one.stage, one.microbatch) for _, one in chosen],
        hovertemplate=f"{label}: stage %{{customdata[0]}}, micro-batch %{{customdata[1]}}, "
        "%{x:.3g} from %{base:.4g}<extra></extra>",
    )
