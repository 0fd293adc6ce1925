"""Where the time of each rank goes: in all, and in the course of the run."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from src.report.figure import new_figure
from src.report.files import Curve, Floats
from src.report.markup import Html, chart, number
from src.report.run_folder import RankTimeline

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
_MOST_ROWS = 16  # ranks in the chart over time
_BUCKETS = 120  # of that chart


def time_charts(timelines: list[RankTimeline]) -> list[Html]:
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


def _total_chart(timelines: list[RankTimeline]) -> Html:
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


def _course_chart(timelines: list[RankTimeline], ranks: int) -> Html:
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
