"""HTML of the parts of a page; every text from a run is escaped here."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

Html = str  # text that is escaped already


@dataclass
class Section:
    """One section of a page; the title is also its link at the top."""

    title: str
    body: Html
    note: str = ""


def text(value: Any) -> Html:
    """Return a value as escaped text."""
    return escape(number(value) if isinstance(value, float) else str(value))


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


def chart(figure: "go.Figure", title: str, note: str = "", *, wide: bool = False, min_width: int = 0) -> Html:
    """Return a chart that `page.js` draws.

    Args:
        figure: a Plotly figure with a height, whose colors are variables of `style.css`, such as `var(--s1)`.
        title: its title.
        note: one sentence below the title.
        wide: whether it takes the full width of the page.
        min_width: in pixels; on a narrower screen the chart scrolls.
    """
    content = json.loads(figure.to_json(validate=False))
    content["layout"].pop("template", None)  # the page's own has both palettes
    content["layout"]["showlegend"] = False  # Plotly's own overlaps the curves of a narrow chart
    data = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")  # nothing can end the script element
    height, kind = figure.layout.height, "chart wide" if wide else "chart"
    plot = f'<div class="plot" role="img" aria-label="{escape(title)}" style="height:{height}px"></div>'
    if min_width:
        plot = f'<div class="scroll" style="--min-width:{min_width}px">{plot}</div>'
    caption = f"<h3>{escape(title)}</h3>" + (f"<p>{escape(note)}</p>" if note else "")
    return (
        f'<figure class="{kind}"><figcaption>{caption}{_legend(figure)}</figcaption>{plot}'
        f'<script type="application/json">{data}</script></figure>'
    )


def _legend(figure: "go.Figure") -> Html:
    """Return the names of the traces with their colors, if there are several; a click hides a trace."""
    colors: dict[str, Any] = {}
    for trace in figure.data:
        if trace.name and trace.showlegend is not False:
            colors.setdefault(trace.name, trace.line.color if trace.type == "scatter" else trace.marker.color)
    items = "".join(
        f'<button type="button" data-trace="{escape(name)}">{swatch(color)}{escape(name)}</button>'
        for name, color in colors.items()
    )
    return f'<div class="legend">{items}</div>' if len(colors) > 1 else ""


def grid(parts: Iterable[Html], columns: str = "") -> Html:
    """Return the parts side by side, as many as fit; `columns` is "narrow" for more of them."""
    content = "".join(parts)
    return f'<div class="grid {columns}">{content}</div>' if content else ""


def card(title: str, body: Html, *, wide: bool = False) -> Html:
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<div class="card{" wide" if wide else ""}">{heading}{body}</div>'


def details(summary: str, body: Html) -> Html:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def tiles(values: Iterable[tuple[str, str, str]]) -> Html:
    """Return the key figures of a page, from (name, value, remark)."""
    cells = [
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for name, value, remark in values
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>' if cells else ""


def swatch(color: str) -> Html:
    return f'<span class="swatch" style="background:{color}"></span>'


def series_color(index: int) -> str:
    """Return the color of the curve with this index."""
    return f"var(--s{index % 10 + 1})"


class Markup(str):
    """A table cell that is HTML already."""


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, sortable: bool = False) -> Html:
    """Return a table. A column of numbers is aligned to the right; a cell can be None, a value or Markup."""
    rows = [list(row) for row in rows]
    numeric = [_is_numeric(row[index] for row in rows) for index in range(len(columns))]
    head = "".join(
        f'<th scope="col"{_class(is_number)}>{escape(name)}</th>'
        for name, is_number in zip(columns, numeric, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(_cell(value, is_number) for value, is_number in zip(row, numeric, strict=True))}</tr>"
        for row in rows
    )
    kind = ' class="sortable"' if sortable else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _is_numeric(cells: Iterable[Any]) -> bool:
    values = [cell for cell in cells if cell is not None]
    return bool(values) and all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in values)


def _class(is_number: bool) -> Html:
    return ' class="number"' if is_number else ""


def _cell(value: Any, is_number: bool) -> Html:
    if is_number:
        shown = number(value) if isinstance(value, float) or value is None else f"{value:,}"
        key = "" if value is None or not isfinite(value) else value
        return f'<td class="number" data-value="{key}">{escape(shown)}</td>'
    if isinstance(value, Markup):
        return f"<td>{value}</td>"
    return f'<td class="text">{"" if value is None else text(value)}</td>'
