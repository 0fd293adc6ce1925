"""Plotly figures, to which `page.js` adds the colors and fonts of the page."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go


def new_figure(height: int, **layout: Any) -> "go.Figure":
    """Return a figure without traces.

    Args:
        height: in pixels.
        layout: further options of Plotly's layout.
    """
    import plotly.graph_objects as go  # late: importing it takes a tenth of a second, and runs can be without it

    return go.Figure(layout={"height": height, "template": {}} | layout)  # copying the default template takes longer


def bar_figure(
    height: int, names: Sequence[str], values: Sequence[float | None], labels: Sequence[str], color: Any = "var(--s1)"
) -> "go.Figure":
    """Return horizontal bars with a label at their ends, the first bar on top.

    Args:
        height: in pixels.
        names: the names of the bars.
        values: their lengths; None is no bar.
        labels: their labels.
        color: one color, or that of each bar.
    """
    figure = new_figure(height, hovermode=False, bargap=0.35)
    figure.add_bar(
        x=values,
        y=names,
        orientation="h",
        marker={"color": color, "cornerradius": 3},
        text=labels,
        textposition="outside",
        textfont={"color": "var(--ink)"},
        cliponaxis=False,
    )
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    return figure
