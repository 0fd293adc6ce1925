"""Where the time of each rank goes: in all, in the course of the run, and in the passes of a pipeline's step."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup

from src.report.page import chart, new_figure, number
from src.report.run_folder import Curve, Floats, RankTimeline, RunFolder
from src.strategies.pipeline.simulation import Action, simulate_order

if TYPE_CHECKING:
    import plotly.graph_objects as go

_SPANS = {
    "data": ("data", "var(--s10)"),
    "forward_backward": ("forward and backward", "var(--s1)"),
    "communication": ("communication", "var(--s2)"),
    "optimizer": ("optimizer", "var(--s3)"),
    "validation": ("validation", "var(--s5)"),
    "save": ("save", "var(--s4)"),
}
_OTHER = "other"
_MOST_ROWS = 16  # ranks in a chart
_BUCKETS = 120  # of the chart over time
_KINDS = {
    "F": ("forward", "var(--forward)"),
    "B": ("backward", "var(--backward)"),
    "I": ("gradients of the inputs", "var(--input-gradient)"),
    "W": ("gradients of the weights", "var(--weight-gradient)"),
}
_MOST_STEPS = 25  # recorded steps, of which the chart shows the one of median duration


class Pass(NamedTuple):
    """One pass of a micro-batch through a stage; `kind` is F, B, I or W, and times are since the step's start."""

    stage: int
    microbatch: int
    kind: str
    start: float
    end: float


Rows = dict[int, list[Pass]]  # the passes of each rank


def time_charts(timelines: list[RankTimeline]) -> list[Markup]:
    """Return the charts of the intervals that the ranks have recorded."""
    timelines = [timeline for timeline in timelines if timeline.intervals]
    if not timelines:
        return []
    return [_total_chart(timelines), _course_chart(timelines[:_MOST_ROWS], len(timelines))]


def slowest_rank(curves: dict[str, Curve]) -> str:
    """Return the sentence that names the rank that was slowest most often, and what balance would gain."""
    ranks = curves["ranks/slowest"].finite().astype(int) if "ranks/slowest" in curves else np.array([], dtype=int)
    if not len(ranks):
        return ""
    counts = np.bincount(ranks)
    slowest, share = int(counts.argmax()), counts.max() / counts.sum()
    sentence = f"Rank {slowest} was the slowest at {share:.0%} of the log points."
    gains = curves["ranks/gain"].finite() if "ranks/gain" in curves else ()
    if len(gains):
        sentence += f" The median step would take {np.median(gains):.1%} less if the slowest were like the median rank."
    return sentence


def _total_chart(timelines: list[RankTimeline]) -> Markup:
    """Return the sum of the seconds of each span, one bar per rank."""
    names = [f"rank {timeline.rank}" for timeline in timelines]
    figure = new_figure(_height(len(names)), barmode="stack", hovermode="y unified")
    totals = [span_seconds(timeline.intervals) for timeline in timelines]
    for kind in _kinds(totals):
        label, color = _look(kind)
        figure.add_bar(
            x=[total.get(kind, 0.0) for total in totals],
            y=names,
            name=label,
            orientation="h",
            marker={"color": color, "line": {"width": 0}},
            hovertemplate="%{x:.1f} s",
        )
    figure.update_xaxes(title="seconds")
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    figure.update_layout(bargap=0.35)
    return chart(figure, "Where the time goes", "Sum over the recorded intervals of each rank.", wide=True)


def span_seconds(intervals: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each span; `other` is the time that no span covers."""
    totals: dict[str, float] = {}
    for interval in intervals:
        for kind, seconds in _spans(interval).items():
            totals[kind] = totals.get(kind, 0.0) + seconds
    return totals


def _spans(interval: dict[str, Any]) -> dict[str, float]:
    spans = {str(kind): float(seconds) for kind, seconds in (interval.get("spans") or {}).items()}
    unnamed = max(0.0, float(interval["seconds"]) - sum(spans.values()))
    return spans | {_OTHER: spans.get(_OTHER, 0.0) + unnamed}


def _kinds(totals: Iterable[dict[str, float]]) -> list[str]:
    """Return the spans in the order of the legend: those of a step, unknown ones, and the time that none covers."""
    found = {kind for total in totals for kind, seconds in total.items() if seconds > 0}
    unknown = sorted(found - set(_SPANS) - {_OTHER})
    return [kind for kind in (*_SPANS, *unknown, _OTHER) if kind in found]


def _look(kind: str) -> tuple[str, str]:
    """Return the label and the color of a span."""
    return _SPANS.get(kind, (kind, "var(--idle)" if kind == _OTHER else "var(--s9)"))


def _course_chart(timelines: list[RankTimeline], ranks: int) -> Markup:
    """Return a row per rank whose colors are the fractions of each span, in the course of the recorded time."""
    end = max(sum(float(interval["seconds"]) for interval in timeline.intervals) for timeline in timelines)
    edges = np.linspace(0, end, _BUCKETS + 1)
    kinds = _kinds(span_seconds(timeline.intervals) for timeline in timelines)
    figure = new_figure(_height(len(timelines), row=44), barmode="overlay", hovermode="closest")
    fractions = [_fractions(timeline.intervals, kinds, edges) for timeline in timelines]
    for index, kind in enumerate(kinds):
        _add_course(figure, kind, index, fractions, edges)
    figure.update_xaxes(title="recorded seconds", showgrid=False)
    rows = list(range(len(timelines)))
    figure.update_yaxes(
        tickvals=[row + 0.4 for row in rows],
        ticktext=[f"rank {timeline.rank}" for timeline in timelines],
        range=[len(rows) - 0.1, -0.1],
        showgrid=False,
    )
    figure.update_layout(bargap=0)
    left_out = f" The first {len(rows)} of {ranks} ranks." if len(rows) < ranks else ""
    bucket = number(float(edges[1]), "s")
    note = f"Each column is {bucket}; its colors are the fractions of the time of that rank.{left_out}"
    return chart(figure, "Timeline of the ranks", note, wide=True)


def _fractions(intervals: list[dict[str, Any]], kinds: list[str], edges: Floats) -> Floats:
    """Return the fraction of each span in each bucket of the recorded time: (spans, buckets)."""
    seconds = np.array([float(interval["seconds"]) for interval in intervals])
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    spans = [_spans(interval) for interval in intervals]
    rows = []
    for kind in kinds:
        sums = np.concatenate([[0.0], np.cumsum([span.get(kind, 0.0) for span in spans])])
        rows.append(np.diff(np.interp(edges, ends, sums)))
    return np.array(rows) / np.diff(edges)


def _add_course(figure: "go.Figure", kind: str, index: int, fractions: list[Floats], edges: Floats) -> None:
    label, color = _look(kind)
    centers, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    x, base, height = [], [], []
    for row, rank_fractions in enumerate(fractions):
        shown = rank_fractions[index] > 1e-3
        below = rank_fractions[:index].sum(axis=0)
        x.append(centers[shown])
        base.append(row + 0.8 * below[shown])
        height.append(0.8 * rank_fractions[index][shown])
    heights = np.concatenate(height)
    figure.add_bar(
        x=np.concatenate(x),
        y=heights,
        base=np.concatenate(base),
        width=width,
        name=label,
        marker={"color": color, "line": {"width": 0}},
        customdata=heights / 0.8,
        hovertemplate=f"{label}: %{{customdata:.0%}}<extra></extra>",
    )


def _height(rows: int, row: int = 30) -> int:
    """Return the height of a chart with so many rows, which are thinner if there are many."""
    return 84 + rows * min(row, max(8, 700 // rows))


def pipeline_charts(run: RunFolder) -> list[Markup]:
    """Return the charts of the schedule: simulated above, the newest recorded step below."""
    step, rows = recorded_passes(run.timelines)
    if not rows:
        return []
    note = f"Step {step:,}, of median duration among the newest recorded ones. {_bubble_sentence(rows)}"
    if (ranks := len(run.timelines)) > len(rows):
        note += f" The first {len(rows)} of {ranks} ranks."
    recorded = passes_chart(rows, "Recorded", note, "milliseconds since the start of the step", scale=1000)
    return [*_simulated_chart(run, rows), recorded]


def _simulated_chart(run: RunFolder, recorded: Rows) -> list[Markup]:
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


def passes_chart(rows: Rows, title: str, note: str, unit: str, scale: float = 1.0) -> Markup:
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
