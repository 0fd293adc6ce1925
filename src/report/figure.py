"""An empty Plotly figure, to which `page.js` adds the colors and fonts of the page."""

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
