"""Where the time of each rank goes, and which rank is the slowest."""

import numpy as np
from markupsafe import Markup

from src.engine.report.page import CATEGORIES, chart, new_figure
from src.engine.report.run_folder import OTHER, Curve, RankTimeline

_ACTIVITIES = {  # labels and colors
    "data": ("data", "var(--s10)"),
    "forward_backward": ("forward and backward", "var(--s1)"),
    "communication": ("communication", "var(--s2)"),
    "optimizer": ("optimizer", "var(--s3)"),
    "validation": ("validation", "var(--s5)"),
    "save": ("save", "var(--s4)"),
    OTHER: (OTHER, "var(--idle)"),
}


def time_charts(timelines: list[RankTimeline]) -> list[Markup]:
    """Return the chart of the seconds of each activity, one bar per rank; nothing if none is recorded."""
    timelines = [timeline for timeline in timelines if timeline.seconds]
    if not timelines:
        return []
    names = [f"rank {timeline.rank}" for timeline in timelines]
    height = 84 + len(names) * min(30, max(8, 700 // len(names)))  # the bars are thinner if there are many
    figure = new_figure(height, barmode="stack", hovermode="y unified", bargap=0.35, yaxis=CATEGORIES)
    for activity, (label, color) in _ACTIVITIES.items():
        seconds = [timeline.seconds.get(activity, 0.0) for timeline in timelines]
        marker = {"color": color, "line": {"width": 0}}
        if any(seconds):
            figure.add_bar(x=seconds, y=names, name=label, orientation="h", marker=marker, hovertemplate="%{x:.1f} s")
    figure.update_xaxes(title="seconds")
    return [chart(figure, "Where the time goes", "Sum over the recorded intervals of each rank.", wide=True)]


def slowest_rank(curves: dict[str, Curve]) -> str:
    """Return the sentence that names the rank that was slowest most often, and what balance would gain."""
    if "ranks/slowest" not in curves or not len(ranks := curves["ranks/slowest"].finite()):
        return ""
    counts = np.bincount(ranks.astype(int))
    sentence = f"Rank {counts.argmax()} was the slowest at {counts.max() / counts.sum():.0%} of the log points."
    if "ranks/gain" in curves and len(gains := curves["ranks/gain"].finite()):
        sentence += f" The median step would take {np.median(gains):.1%} less if the slowest were like the median rank."
    return sentence
