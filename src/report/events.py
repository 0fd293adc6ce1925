"""The events of a run: lines on its charts, and a table."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from src.report.markup import Html, Markup, table

if TYPE_CHECKING:
    import plotly.graph_objects as go

_CLOSE = 0.03  # fraction of the axis within which the labels of two events would overlap
_MOST_LABELS = 8  # more of them would cover the curves
_COLORS = {
    "resume": "var(--accent)",
    "restart": "var(--accent)",
    "stopped": "var(--warn)",
    "failed": "var(--bad)",
    "killed": "var(--bad)",
}


def mark_events(figure: "go.Figure", events: list[dict[str, Any]], last_step: float) -> None:
    """Draw a line at the step of each event between start and end; events that follow closely share it.

    Args:
        figure: the chart, whose x axis has steps.
        events: all events of the run, by time.
        last_step: where the axis ends.
    """
    marks: list[tuple[int, list[str]]] = []
    for event in events:
        if event["event"] not in _COLORS or event.get("step") is None:
            continue
        step = int(event["step"])
        if not marks or abs(step - marks[-1][0]) > _CLOSE * last_step:
            marks.append((step, []))
        marks[-1][1].append(event["event"])
    for step, names in marks:
        color = _COLORS[names[0]]
        figure.add_shape(x0=step, x1=step, y0=0, y1=1, yref="paper", line={"color": color, "width": 1, "dash": "dot"})
        if len(marks) <= _MOST_LABELS:
            side = "left" if step <= _CLOSE * last_step else "right"  # where the ticks of the value axis are
            _add_label(figure, step, ", ".join(dict.fromkeys(names)), color, side)


def _add_label(figure: "go.Figure", step: int, label: str, color: str, side: str) -> None:
    figure.add_annotation(
        x=step,
        y=1,
        yref="paper",
        text=label,
        font={"size": 10, "color": color},
        textangle=-90,
        xanchor=side,
        yanchor="top",
        borderpad=0,
        showarrow=False,
    )


def event_table(events: list[dict[str, Any]]) -> Html:
    """Return the events as a table, in the order of time."""
    rows = [
        (
            _time(event),
            event["event"],
            event.get("step"),
            event.get("reason") or _command(event),
        )
        for event in events
    ]
    return table(("time", "event", "step", "reason or command"), rows) if rows else ""


def _time(event: dict[str, Any]) -> Markup:
    time = datetime.fromtimestamp(event.get("time") or 0.0)
    return Markup(f'<span class="fixed">{time:%Y-%m-%d}</span> <span class="fixed">{time:%H:%M:%S}</span>')


def _command(event: dict[str, Any]) -> str:
    return " ".join(map(str, event.get("command") or []))


def duration(events: list[dict[str, Any]]) -> float | None:
    """Return the seconds in which the run had a process; None if no end is recorded."""
    total, began = None, None
    for event in events:
        if event["event"] in ("start", "resume"):
            began = float(event["time"])
        elif began is not None:
            total, began = (total or 0.0) + float(event["time"]) - began, None
    return total
