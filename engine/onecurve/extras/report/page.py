"""Pages and their parts: the Jinja2 templates in `templates/`, and Plotly figures that `page.js` draws."""

import json
import os
import re
from datetime import datetime
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from onecurve.records.files import atomic_write

TEMPLATES = Path(__file__).parent / "templates"
Figure = Any  # of plotly, which is imported late: it takes a tenth of a second, and runs can be without it


class Section(NamedTuple):
    """One section of a page; the title is also its link at the top."""

    title: str
    body: Markup
    note: str = ""


def number(value: float | None, unit: str = "") -> str:
    """Return a number with at least four significant digits and separators of thousands; a dash for None and nan."""
    if value is None or value != value:
        return "–"
    if not isfinite(value):
        return "∞" if value > 0 else "−∞"
    shown = f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"
    return f"{shown} {unit}".strip()


def duration_text(seconds: float) -> str:
    """Return a duration in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def series_color(index: int) -> str:
    return f"var(--s{index % 10 + 1})"


_SYNTAX: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.do"]}
_ENVIRONMENT = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, **_SYNTAX)
_ENVIRONMENT.filters |= {
    "breakable": lambda name: Markup(re.sub("([._])", r"\1<wbr>", str(escape(name)))),
    "anchor": lambda title: title.lower().replace(" ", "-"),
    "datetime": lambda seconds: datetime.fromtimestamp(seconds or 0.0),
    "count": lambda value: f"{value:,}" if isinstance(value, int) else number(value),
    "text": lambda value: number(value) if isinstance(value, float) else str(value),
}
_ENVIRONMENT.tests |= {
    "all_numbers": lambda cells: {type(cell) for cell in cells} - {type(None)} in ({int}, {float}, {int, float}),
    "finite": lambda value: value is not None and isfinite(value),
}


def macros(page: str) -> Any:
    """Return the macros of a template as functions that return HTML."""
    return _ENVIRONMENT.get_template(f"{page}.html.j2").module


parts = macros("parts")


def new_figure(height: int, **layout: Any) -> Figure:
    """Return a figure without traces, of a height in pixels; `layout` has further options of Plotly's layout."""
    import plotly.graph_objects as go

    return go.Figure(layout={"height": height, "template": {}} | layout)  # copying the default template takes longer


def chart(figure: Figure, title: str, note: str = "", *, wide: bool = False) -> Markup:
    """Return a chart that `page.js` draws; a wide one takes the full width of the page.

    The figure has a height, and its colors are variables of `style.css`, such as `var(--s1)`.
    """
    content = json.loads(figure.to_json(validate=False))
    content["layout"].pop("template", None)  # the page's own has both palettes
    content["layout"]["showlegend"] = False  # Plotly's own overlaps the curves of a narrow chart
    data = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")  # nothing can end the script element
    legend: dict[str, Any] = {}
    for trace in figure.data:
        if trace.name and trace.showlegend is not False:
            legend.setdefault(trace.name, trace.line.color if trace.type == "scatter" else trace.marker.color)
    return parts.chart(Markup(data), legend, figure.layout.height, title, note, wide)


def write_page(
    file: Path, kind: str, title: str, lead: str, sections: list[Section], scripts: Path | None = None
) -> Path:
    """Write a page atomically, without the sections that have no body; return its path.

    `scripts` is the folder for Plotly's JavaScript, which many pages share; None puts it into the page.
    """
    from plotly.offline import get_plotlyjs

    shared = scripts and scripts / f".plotly-{version('plotly')}.min.js"  # hidden: runs/* are the runs alone
    if shared and not shared.is_file():
        try:
            with atomic_write(shared) as temporary:
                temporary.write_text(get_plotlyjs())
        except OSError:  # such as beside a mounted folder, in a container
            shared = None
    content = _ENVIRONMENT.get_template("page.html.j2").render(
        kind=kind,
        title=title,
        lead=lead,
        sections=[section for section in sections if section.body.strip()],
        version=version("plotly"),
        time=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        script_link=os.path.relpath(shared, file.parent) if shared else "",
        plotlyjs="" if shared else Markup(get_plotlyjs()),  # its own text never has the end of a script element
    )
    with atomic_write(file) as temporary:
        temporary.write_text(content, encoding="utf-8", errors="replace")  # a path in an error may be no valid text
    return file
