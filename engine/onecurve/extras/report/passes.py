"""The passes of a pipeline's step: as a run has recorded them, as its schedule orders them, and as a chart."""

from collections import defaultdict
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from onecurve.extras.report.metric_charts import CATEGORIES
from onecurve.extras.report.page import Figure, chart, new_figure
from onecurve.extras.report.run_folder import RunFolder
from onecurve.extras.report.simulation import Action, Pass, bubble, duration, order_of_passes, simulate
from onecurve.parallel.pipeline.schedules import SCHEDULES
from onecurve.records.files import read_json_lines

_KINDS = {
    "F": ("forward", "var(--forward)"),
    "B": ("backward", "var(--backward)"),
    "I": ("gradients of the inputs", "var(--input-gradient)"),
    "W": ("gradients of the weights", "var(--weight-gradient)"),
}
Step = list[list[Pass]]  # the passes of each rank of one pipeline


def passes_chart(run: RunFolder) -> Markup:
    """Return the chart of a recorded step, and above it a simulated one; empty if no step of the run is recorded."""
    schedule, count = run.config.get("strategy.schedule"), run.config.get("strategy.microbatches")
    ranks = run.config.get("strategy.stages") or run.world_size
    if run.config.get("bit_exact") and ranks and run.world_size:  # the micro-batches are a replica's virtual ranks
        count = run.config["virtual_ranks"] * ranks // run.world_size
    if schedule not in SCHEDULES or not (count and ranks and run.rank_seconds):
        return Markup()
    recorded = fastest_step(run.path, order_of_passes(schedule, ranks, count))
    if not recorded:
        return Markup()
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for one in chain(*recorded):
        seconds[one.stage, one.kind].append(one.end - one.start)
    simulated = simulate(schedule, ranks, count, lambda action: median(seconds[action.stage, action.kind]))
    layout = {"barmode": "overlay", "hovermode": "closest", "uniformtext": {"minsize": 8, "mode": "hide"}}
    figure = new_figure(84 + 2 * ranks * min(30, max(8, 700 // ranks)), bargap=0.14, **layout)
    draw_passes(figure, simulated, 1000, "simulated, rank")
    draw_passes(figure, recorded, 1000, "recorded, rank")
    figure.update_xaxes(title="milliseconds", showgrid=False)
    figure.update_yaxes(CATEGORIES)
    note = (
        f"The bubble is {bubble(simulated):.1%} of the simulated step, and {bubble(recorded):.1%} of the recorded one. "
        "A simulated pass takes the median of its stage's, so the difference is waiting, communication and variation."
    )
    return chart(figure, f"Passes of {schedule}", note, wide=True)


def fastest_step(run: Path, order: list[list[Action]]) -> Step:
    """Return the shortest recorded step, which other programs have disturbed least; empty if none has these passes.

    A run folder may also have steps of another schedule or number of ranks. Of a step that accumulates batches, the
    first batch is returned.
    """
    steps: dict[int, dict[int, list[Pass]]] = defaultdict(dict)  # by step and rank, in UNIX seconds
    for rank, actions in enumerate(order):
        for line in read_json_lines(run / "timeline" / f"rank{rank}.jsonl"):
            found = line["passes"][: len(actions)] if line["kind"] == "passes" else []
            if sorted(Action(*one[:3]) for one in found) == sorted(actions):
                steps[line["step"]][rank] = [
                    Pass(*one[:3], *(line["start"] + time for time in one[3:])) for one in found
                ]
    complete = [[step[rank] for rank in sorted(step)] for step in steps.values() if len(step) == len(order)]
    return min(map(_from_zero, complete), key=duration, default=[])


def _from_zero(step: Step) -> Step:
    """Return a step with the seconds since its first pass."""
    first = min(one.start for one in chain(*step))
    return [[one._replace(start=one.start - first, end=one.end - first) for one in passes] for passes in step]


def draw_passes(figure: Figure, step: Step, scale: float, label: str = "rank", axis: str = "") -> None:
    """Draw the passes over the bubble, a row per rank; the later stages of a rank are paler.

    The figure has `barmode="overlay"`, and `axis` is the number of its axes to draw on; `scale` gives their unit.
    """
    axes: dict[str, Any] = {"xaxis": f"x{axis}", "yaxis": f"y{axis}", "orientation": "h"}
    names = [f"{label} {rank}" for rank in range(len(step))]
    marker: dict[str, Any] = {"color": "var(--bubble)", "line": {"width": 0}}
    figure.add_bar(
        x=[scale * duration(step)] * len(step), y=names, name="bubble", marker=marker, hoverinfo="skip", **axes
    )
    first_stages = [min(one.stage for one in passes) for passes in step]
    for kind, (name, color) in _KINDS.items():
        chosen = [(rank, one) for rank, passes in enumerate(step) for one in passes if one.kind == kind]
        if not chosen:
            continue
        opacity = [0.7 if one.stage > first_stages[rank] else 1.0 for rank, one in chosen]
        figure.add_bar(
            x=[scale * (one.end - one.start) for _, one in chosen],
            y=[names[rank] for rank, _ in chosen],
            base=[scale * one.start for _, one in chosen],
            name=name,
            marker={"color": color, "opacity": opacity, "line": {"width": 1, "color": "var(--card)"}},
            text=[one.microbatch for _, one in chosen],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": "var(--on-pass)", "size": 11},
            constraintext="inside",
            hovertemplate=f"{name} of micro-batch %{{text}}: %{{base:.4g}} to %{{x:.4g}}<extra></extra>",
            **axes,
        )
