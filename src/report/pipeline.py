"""The passes of a pipeline in one step: as simulated, and as recorded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from src.report.figure import new_figure
from src.report.markup import Html, chart
from src.report.run_folder import RankTimeline, RunFolder
from src.strategies.pipeline.simulation import Action, simulate_order

if TYPE_CHECKING:
    import plotly.graph_objects as go

_KINDS = {
    "F": ("forward", "var(--forward)"),
    "B": ("backward", "var(--backward)"),
    "I": ("gradients of the inputs", "var(--input-gradient)"),
    "W": ("gradients of the weights", "var(--weight-gradient)"),
}
_MOST_ROWS = 16  # ranks in the chart
_MOST_STEPS = 25  # recorded steps, of which the chart shows the one of median duration


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
    note = f"Step {step:,}, of median duration among the newest recorded ones. {_bubble_sentence(rows)}"
    if (ranks := len(run.timelines)) > len(rows):
        note += f" The first {len(rows)} of {ranks} ranks."
    recorded = passes_chart(rows, "Recorded", note, "milliseconds since the start of the step", scale=1000)
    return [*_simulated_chart(run, rows), recorded]


def _simulated_chart(run: RunFolder, recorded: Rows) -> list[Html]:
    """Return the chart of the recorded order of passes with ideal times; nothing if the record is not complete."""
    order = [list(dict.fromkeys(Action(*one[:3]) for one in passes)) for passes in recorded.values()]
    try:
        timeline = simulate_order(order)
    except ValueError:
        return []
    rows = {rank: [Pass(*one) for one in passes] for rank, passes in zip(recorded, timeline, strict=True)}
    schedule = run.config.get("strategy.schedule") or "This order of passes"
    note = f"{schedule}, if all stages cost the same and sending takes no time. {_bubble_sentence(rows)}"
    return [passes_chart(rows, "Simulated", note, "duration of a forward pass")]


def recorded_passes(timelines: list[RankTimeline]) -> tuple[int, Rows]:
    """Return the step of median duration among the newest that all ranks have recorded, and its passes."""
    steps = sorted(recorded_steps(timelines), key=lambda numbered: _end(numbered[1]))
    return steps[len(steps) // 2] if steps else (0, {})


def recorded_steps(timelines: list[RankTimeline]) -> list[tuple[int, Rows]]:
    """Return the newest steps that all ranks have recorded, and the passes of each in seconds since its first one."""
    timelines = [timeline for timeline in timelines if timeline.passes][:_MOST_ROWS]
    by_rank = [{record["step"]: record for record in timeline.passes} for timeline in timelines]
    common = sorted(set.intersection(*map(set, by_rank)))[-_MOST_STEPS:] if by_rank else []
    steps = []
    for step in common:
        lines = {timeline.rank: records[step] for timeline, records in zip(timelines, by_rank, strict=True)}
        steps.append((step, _aligned(lines)))
    return steps


def _aligned(lines: dict[int, dict[str, Any]]) -> Rows:
    """Return the passes of each rank since the first pass of all; the times of a line count from its `start`."""
    starts = {rank: float(line.get("start") or 0.0) for rank, line in lines.items()}
    first = min(starts[rank] + one[3] for rank, line in lines.items() for one in line["passes"])
    rows: Rows = {}
    for rank, line in lines.items():
        offset = starts[rank] - first
        rows[rank] = [Pass(one[0], one[1], one[2], offset + one[3], offset + one[4]) for one in line["passes"]]
    return rows


def _end(rows: Rows) -> float:
    return max(one.end for passes in rows.values() for one in passes)


def bubble(rows: Rows) -> float:
    """Return the fraction of the step in which the ranks idle on average."""
    total = len(rows) * _end(rows)
    busy = sum(one.end - one.start for passes in rows.values() for one in passes)
    return (total - busy) / total if total else 0.0


def _bubble_sentence(rows: Rows) -> str:
    has_several_stages = any(len({one.stage for one in passes}) > 1 for passes in rows.values())
    colors = " The later stages of a rank are paler." if has_several_stages else ""
    return f"The ranks idle {bubble(rows):.1%} of the step (shaded).{colors}"


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
    draw_passes(figure, rows, scale)
    end = scale * _end(rows)
    figure.update_xaxes(title=unit, range=[0, end], showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    figure.update_layout(bargap=0.18, uniformtext={"minsize": 8, "mode": "hide"})
    return chart(figure, title, note, wide=True, min_width=640)


def draw_passes(figure: "go.Figure", rows: Rows, scale: float = 1.0, axis: str = "") -> None:
    """Draw the passes over the bubble, a row per rank.

    Args:
        figure: a Plotly figure with `barmode="overlay"`.
        rows: the passes of each rank.
        scale: factor from the times of the passes to the unit of the axis.
        axis: number of the figure's axes to draw on; empty for the first ones.
    """
    axes = {"xaxis": f"x{axis}", "yaxis": f"y{axis}", "orientation": "h"}
    end = scale * _end(rows)
    names = {rank: f"rank {rank}" for rank in rows}
    figure.add_bar(
        x=[end] * len(rows),
        y=list(names.values()),
        name="bubble",
        marker={"color": "var(--bubble)", "line": {"width": 0}},
        hoverinfo="skip",
        **axes,
    )
    first_stage = {names[rank]: min(one.stage for one in passes) for rank, passes in rows.items()}
    for kind, (label, color) in _KINDS.items():
        chosen = [(names[rank], one) for rank, passes in rows.items() for one in passes if one.kind == kind]
        if chosen:
            opacity = [0.7 if one.stage > first_stage[name] else 1.0 for name, one in chosen]
            _add_passes(figure, label, {"color": color, "opacity": opacity}, chosen, scale, axes)


def _add_passes(
    figure: "go.Figure",
    label: str,
    marker: dict[str, Any],
    chosen: Sequence[tuple[str, Pass]],
    scale: float,
    axes: dict[str, Any],
) -> None:
    """Add the passes of one kind."""
    figure.add_bar(
        x=[scale * (one.end - one.start) for _, one in chosen],
        y=[name for name, _ in chosen],
        base=[scale * one.start for _, one in chosen],
        name=label,
        marker=marker | {"line": {"width": 1, "color": "var(--card)"}},
        text=[one.microbatch for _, one in chosen],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": "var(--on-pass)", "size": 11},
        constraintext="inside",
        customdata=[(one.stage, one.microbatch) for _, one in chosen],
        hovertemplate=f"{label}: stage %{{customdata[0]}}, micro-batch %{{customdata[1]}}, "
        "%{x:.3g} from %{base:.4g}<extra></extra>",
        **axes,
    )
