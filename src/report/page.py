"""Write a page, and Plotly's JavaScript once beside all pages."""

import os
from datetime import datetime
from html import escape
from pathlib import Path
from string import Template

from src.report.markup import Html, Section
from src.utils.files import atomic_write

_ASSETS = Path(__file__).parent / "assets"


def write_page(
    file: Path, kind: str, title: str, lead: Html, sections: list[Section], scripts: Path | None = None
) -> None:
    """Write a page atomically.

    Args:
        file: the page.
        kind: what it is about, such as "Run".
        title: its title.
        lead: what stands below the title.
        sections: its sections; those without a body are left out.
        scripts: the folder for Plotly's JavaScript, which many pages share; None puts it into the page.
    """
    import plotly

    shown = [section for section in sections if section.body]
    content = Template((_ASSETS / "page.html").read_text()).substitute(
        kind=escape(kind),
        title=escape(title),
        lead=lead,
        links="".join(f'<a href="#{_anchor(section)}">{escape(section.title)}</a>' for section in shown),
        sections="\n".join(map(_section, shown)),
        version=escape(plotly.__version__),
        made=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z} · Plotly {escape(plotly.__version__)}",
        style=(_ASSETS / "style.css").read_text(),
        script=(_ASSETS / "page.js").read_text(),
        plotly=_plotly(file.parent, scripts),
    )
    with atomic_write(file) as temporary:
        temporary.write_text(content, encoding="utf-8", errors="replace")  # a path in an error may be no valid text


def _section(section: Section) -> Html:
    note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
    return f'<section id="{_anchor(section)}"><h2>{escape(section.title)}</h2>{note}{section.body}</section>'


def _anchor(section: Section) -> str:
    return section.title.lower().replace(" ", "-")


def _plotly(folder: Path, scripts: Path | None) -> Html:
    """Return the script element of Plotly: inside the page, or a relative link."""
    from plotly.offline import get_plotlyjs

    if scripts is None:
        return f"<script>{get_plotlyjs()}</script>"  # its own text never has the end of a script element
    return f'<script src="{escape(os.path.relpath(_shared_plotly(folder, scripts), folder))}"></script>'


def _shared_plotly(folder: Path, scripts: Path) -> Path:
    """Write Plotly's JavaScript, unless it is there; where `scripts` is not writable, into the page's own folder."""
    import plotly
    from plotly.offline import get_plotlyjs

    name = f"plotly-{plotly.__version__}.min.js"
    for parent in (scripts, folder):
        file = parent / name
        if file.is_file():
            return file
        if os.access(parent, os.W_OK):
            with atomic_write(file) as temporary:
                temporary.write_text(get_plotlyjs())
            return file
    raise PermissionError(f"cannot write to {folder}")
