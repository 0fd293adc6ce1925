"""The passes of a pipeline's step: as a run has recorded them, and as a chart."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.engine.parallel.pipeline.simulation import Pass
from src.engine.utils.files import read_json_lines

if TYPE_CHECKING:
    import plotly.graph_objects as go

_KINDS = {
    "F": ("forward", "var(--forward)"),
    "B": ("backward", "var(--backward)"),
    "I": ("gradients of the inputs", "var(--input-gradient)"),
    "W": ("gradients of the weights", "var(--weight-gradient)"),
}
Rows = dict[int, list[Pass]]  # the passes of each rank


def duration(rows: Rows) -> float:
    return max(one.end for passes in rows.values() for one in passes)


def fastest_step(run: Path) -> Rows:
    """Return the passes of the shortest recorded step, which other programs have disturbed least.

    Raises:
        ValueError: if no step is recorded.
    """
    steps: dict[int, dict[int, Any]] = {}  # the record of each rank by step
    for rank in range(len(list((run / "timeline").glob("rank*.jsonl")))):
        for line in read_json_lines(run / "timeline" / f"rank{rank}.jsonl"):
            if line["kind"] == "passes":
                steps.setdefault(line["step"], {})[rank] = line
    return min(map(_aligned, steps.values()), key=duration)


def _aligned(records: dict[int, dict[str, Any]]) -> Rows:
    """Return the passes of each rank since the first pass of all; the times of a record count from its `start`."""
    first = min(record["start"] + one[3] for record in records.values() for one in record["passes"])
    return {
        rank: [Pass(*one[:3], *(record["start"] - first + time for time in one[3:])) for one in record["passes"]]
        for rank, record in records.items()
    }


def draw_passes(figure: "go.Figure", rows: Rows, scale: float, axis: str) -> None:
    """Draw the passes over the bubble, a row per rank; the later stages of a rank are paler.

    Args:
        figure: a Plotly figure with `barmode="overlay"`.
        rows: the passes of each rank.
        scale: factor from the times of the passes to the unit of the axis.
        axis: number of the figure's axes to draw on; empty for the first ones.
    """
    axes: dict[str, Any] = {"xaxis": f"x{axis}", "yaxis": f"y{axis}", "orientation": "h"}
    ends, names = [scale * duration(rows)] * len(rows), [f"rank {rank}" for rank in rows]
    marker: dict[str, Any] = {"color": "var(--bubble)", "line": {"width": 0}}
    figure.add_bar(x=ends, y=names, name="bubble", marker=marker, **axes)
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
            **axes,
        )
