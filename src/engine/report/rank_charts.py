"""Where the time of each rank goes: in all, in the course of the run, and in the passes of a pipeline's step."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from src.engine.parallel.pipeline.simulation import Action, Pass, bubble, simulate_order
from src.engine.report.page import CATEGORIES, chart, new_figure, number
from src.engine.report.run_folder import OTHER, Curve, Floats, RankTimeline, RunFolder, Seconds, total_seconds

if TYPE_CHECKING:
    import plotly.graph_objects as go

_ACTIVITIES = {  # labels and colors
    "data": ("data", "var(--s10)"),
    "forward_backward": ("forward and backward", "var(--s1)"),
    "communication": ("communication", "var(--s2)"),
    "optimizer": ("optimizer", "var(--s3)"),
    "validation": ("validation", "var(--s5)"),
    "save": ("save", "var(--s4)"),
}
_MOST_ROWS = 16  # ranks in a chart
_BUCKETS = 120  # of the chart over time
_ROW = 0.8  # height of a rank in the chart over time
_KINDS = {
    "F": ("forward", "var(--forward)"),
    "B": ("backward", "var(--backward)"),
    "I": ("gradients of the inputs", "var(--input-gradient)"),
    "W": ("gradients of the weights", "var(--weight-gradient)"),
}
_MOST_STEPS = 25  # recorded steps, of which the chart shows the one of median duration


Rows = dict[int, list[Pass]]  # the passes of each rank


def time_charts(timelines: list[RankTimeline]) -> list[Markup]:
    """Return the charts of the intervals that the ranks have recorded."""
    timelines = [timeline for timeline in timelines if timeline.intervals]
    return [_total_chart(timelines), _course_chart(timelines)] if timelines else []


def slowest_rank(curves: dict[str, Curve]) -> str:
    """Return the sentence that names the rank that was slowest most often, and what balance would gain."""
    if "ranks/slowest" not in curves or not len(ranks := curves["ranks/slowest"].finite()):
        return ""
    counts = np.bincount(ranks.astype(int))
    sentence = f"Rank {counts.argmax()} was the slowest at {counts.max() / counts.sum():.0%} of the log points."
    if "ranks/gain" in curves and len(gains := curves["ranks/gain"].finite()):
        sentence += f" The median step would take {np.median(gains):.1%} less if the slowest were like the median rank."
    return sentence


def _total_chart(timelines: list[RankTimeline]) -> Markup:
    """Return the sum of the seconds of each activity, one bar per rank."""
    names = [f"rank {timeline.rank}" for timeline in timelines]
    figure = new_figure(_height(len(names)), barmode="stack", hovermode="y unified", bargap=0.35, yaxis=CATEGORIES)
    totals = [total_seconds(timeline.intervals) for timeline in timelines]
    for activity in _activities(totals):
        label, color = _look(activity)
        seconds = [total.get(activity, 0.0) for total in totals]
        marker = {"color": color, "line": {"width": 0}}
        figure.add_bar(x=seconds, y=names, name=label, orientation="h", marker=marker, hovertemplate="%{x:.1f} s")
    figure.update_xaxes(title="seconds")
    return chart(figure, "Where the time goes", "Sum over the recorded intervals of each rank.", wide=True)


def _activities(totals: Iterable[Seconds]) -> list[str]:
    """Return the activities in the order of the legend: those of a step, unknown ones, and `other`."""
    found = {activity for total in totals for activity, seconds in total.items() if seconds > 0}
    unknown = sorted(found - set(_ACTIVITIES) - {OTHER})
    return [activity for activity in (*_ACTIVITIES, *unknown, OTHER) if activity in found]


def _look(activity: str) -> tuple[str, str]:
    """Return the label and the color of an activity."""
    return _ACTIVITIES.get(activity, (activity, "var(--idle)" if activity == OTHER else "var(--s9)"))


def _course_chart(timelines: list[RankTimeline]) -> Markup:
    """Return a row per rank whose colors are the fractions of each activity, in the course of the recorded time."""
    shown = timelines[:_MOST_ROWS]
    totals = [total_seconds(timeline.intervals) for timeline in shown]
    activities = _activities(totals)
    edges = np.linspace(0, max(sum(total.values()) for total in totals), _BUCKETS + 1)
    centers = (edges[1:] + edges[:-1]) / 2
    fractions = np.array([_fractions(timeline.intervals, activities, edges) for timeline in shown])
    below = fractions.cumsum(axis=1) - fractions
    figure = new_figure(_height(len(shown), row=44), barmode="overlay", hovermode="closest", bargap=0)
    for index, activity in enumerate(activities):
        label, color = _look(activity)
        rows, buckets = np.nonzero(fractions[:, index] > 1e-3)
        figure.add_bar(
            x=centers[buckets],
            y=_ROW * fractions[rows, index, buckets],
            base=rows + _ROW * below[rows, index, buckets],
            width=edges[1],
            name=label,
            marker={"color": color, "line": {"width": 0}},
            customdata=fractions[rows, index, buckets],
            hovertemplate=f"{label}: %{{customdata:.0%}}<extra></extra>",
        )
    figure.update_xaxes(title="recorded seconds", showgrid=False)
    ticks = {"tickvals": np.arange(len(shown)) + _ROW / 2, "ticktext": [f"rank {one.rank}" for one in shown]}
    figure.update_yaxes(ticks, range=[len(shown) - 0.1, -0.1], showgrid=False)
    note = f"Each column is {number(edges[1], 's')}; its colors are the fractions of the time of that rank."
    return chart(figure, "Timeline of the ranks", note + _left_out(len(shown), len(timelines)), wide=True)


def _fractions(intervals: list[Seconds], activities: list[str], edges: Floats) -> Floats:
    """Return the fraction of each activity in each bucket of the recorded time: (activities, buckets)."""
    seconds = np.array([[interval.get(activity, 0.0) for activity in activities] for interval in intervals])
    sums = np.concatenate([np.zeros((1, len(activities))), seconds.cumsum(axis=0)])
    until_edges = [np.interp(edges, sums.sum(axis=1), one) for one in sums.T]
    return np.diff(until_edges) / edges[1]


def _height(rows: int, row: int = 30) -> int:
    """Return the height of a chart with so many rows, which are thinner if there are many."""
    return 84 + rows * min(row, max(8, 700 // rows))


def _left_out(rows: int, ranks: int) -> str:
    return f" The first {rows} of {ranks} ranks." if rows < ranks else ""


def pipeline_charts(run: RunFolder) -> list[Markup]:
    """Return the charts of the schedule: simulated above, the newest recorded step below."""
    step, rows = recorded_passes(run.timelines)
    if not rows:
        return []
    note = f"Step {step:,}, of median duration among the newest recorded ones. {_bubble_sentence(rows)}"
    note += _left_out(len(rows), len(run.timelines))
    recorded = passes_chart(rows, "Recorded", note, "milliseconds since the start of the step", scale=1000)
    return [*_simulated_chart(run, rows), recorded]


def _simulated_chart(run: RunFolder, recorded: Rows) -> list[Markup]:
    """Return the chart of the recorded order of passes with ideal times; nothing if the record is not complete."""
    order = [list(dict.fromkeys(Action(*one[:3]) for one in passes)) for passes in recorded.values()]
    try:
        timeline = simulate_order(order)
    except ValueError:
        return []
    rows = dict(zip(recorded, timeline, strict=True))
    schedule = run.config.get("strategy.schedule") or "This order of passes"
    note = f"{schedule}, if all stages cost the same and sending takes no time. {_bubble_sentence(rows)}"
    return [passes_chart(rows, "Simulated", note, "duration of a forward pass")]


def recorded_passes(timelines: list[RankTimeline]) -> tuple[int, Rows]:
    """Return the step of median duration among the newest that all ranks have recorded, and its passes."""
    steps = sorted(recorded_steps(timelines), key=lambda numbered: _end(numbered[1]))
    return steps[len(steps) // 2] if steps else (0, {})


def recorded_steps(timelines: list[RankTimeline]) -> list[tuple[int, Rows]]:
    """Return the newest steps that all ranks have recorded, and the passes of each in seconds since its first one."""
    by_rank = {
        timeline.rank: {record["step"]: record for record in timeline.passes}
        for timeline in [timeline for timeline in timelines if timeline.passes][:_MOST_ROWS]
    }
    common = sorted(set.intersection(*map(set, by_rank.values())))[-_MOST_STEPS:] if by_rank else []
    return [(step, _aligned({rank: records[step] for rank, records in by_rank.items()})) for step in common]


def _aligned(records: dict[int, dict[str, Any]]) -> Rows:
    """Return the passes of each rank since the first pass of all; the times of a record count from its `start`."""
    starts = {rank: float(record.get("start") or 0.0) for rank, record in records.items()}
    first = min(starts[rank] + one[3] for rank, record in records.items() for one in record["passes"])
    return {
        rank: [Pass(*one[:3], *(starts[rank] - first + time for time in one[3:])) for one in record["passes"]]
        for rank, record in records.items()
    }


def _end(rows: Rows) -> float:
    return max(one.end for passes in rows.values() for one in passes)


def _bubble_sentence(rows: Rows) -> str:
    has_several_stages = any(len({one.stage for one in passes}) > 1 for passes in rows.values())
    colors = " The later stages of a rank are paler." if has_several_stages else ""
    return f"The ranks idle {bubble(rows.values()):.1%} of the step (shaded).{colors}"


def passes_chart(rows: Rows, title: str, note: str, unit: str, scale: float = 1.0) -> Markup:
    """Return the chart of the passes, a row per rank; `scale` is the factor from their times to the axis's unit."""
    figure = new_figure(70 + 40 * len(rows), barmode="overlay", hovermode="closest", bargap=0.18, yaxis=CATEGORIES)
    draw_passes(figure, rows, scale)
    figure.update_xaxes(title=unit, range=[0, scale * _end(rows)], showgrid=False)
    figure.update_layout(uniformtext={"minsize": 8, "mode": "hide"})
    return chart(figure, title, note, wide=True, min_width=640)


def draw_passes(figure: "go.Figure", rows: Rows, scale: float = 1.0, axis: str = "") -> None:
    """Draw the passes over the bubble, a row per rank.

    Args:
        figure: a Plotly figure with `barmode="overlay"`.
        rows: the passes of each rank.
        scale: factor from the times of the passes to the unit of the axis.
        axis: number of the figure's axes to draw on; empty for the first ones.
    """
    axes: dict[str, Any] = {"xaxis": f"x{axis}", "yaxis": f"y{axis}", "orientation": "h"}
    ends, names = [scale * _end(rows)] * len(rows), [f"rank {rank}" for rank in rows]
    marker: dict[str, Any] = {"color": "var(--bubble)", "line": {"width": 0}}
    figure.add_bar(x=ends, y=names, name="bubble", marker=marker, hoverinfo="skip", **axes)
    first_stages = {rank: min(one.stage for one in passes) for rank, passes in rows.items()}
    for kind, (label, color) in _KINDS.items():
        chosen = [(rank, one) for rank, passes in rows.items() for one in passes if one.kind == kind]
        if not chosen:
            continue
        opacity = [0.7 if one.stage > first_stages[rank] else 1.0 for rank, one in chosen]
        figure.add_bar(
            x=[scale * (one.end - one.start) for _, one in chosen],
            y=[f"rank {rank}" for rank, _ in chosen],
            base=[scale * one.start for _, one in chosen],
            name=label,
            marker={"color": color, "opacity": opacity, "line": {"width": 1, "color": "var(--card)"}},
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
