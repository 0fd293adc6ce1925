"""A Plotly figure as an SVG file in the colors of the report pages: light, or dark where the reader's theme is."""

import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

_STYLE = Path(__file__).parents[2] / "onecurve" / "extras" / "report" / "templates" / "style.css"
_PADDING = 14  # pixels between the figure and the edge
_WIDTH = 900 - 2 * _PADDING  # pixels; a page on GitHub has 900
_AXIS = {"gridcolor": "var(--grid)", "linecolor": "var(--line)", "zeroline": False, "automargin": True}
_FONT = {"family": "Helvetica, Arial, sans-serif", "size": 12, "color": "var(--muted)"}


def palettes() -> tuple[dict[str, str], dict[str, str]]:
    """Return the light and the dark colors by the names of their CSS variables."""
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6}|rgba\([^)]*\));", block))
        for block in re.findall(r":root \{(.*?)\}", _STYLE.read_text(), re.DOTALL)
    )
    return light, light | dark


def to_svg(figure: "go.Figure", title: str) -> str:
    """Return the figure as the text of an SVG file without references to other files.

    Args:
        figure: a figure with a height, whose colors are variables of the pages' `style.css`, such as `var(--s1)`.
        title: what the picture shows, for readers who do not see it.
    """
    import plotly.graph_objects as go

    light, dark = palettes()
    content = _resolve(figure.to_plotly_json(), light)
    template = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font": _FONT}
    template |= {"xaxis": _AXIS, "yaxis": _AXIS, "margin": {"l": 4, "r": 4, "t": 4, "b": 4}}
    shown = go.Figure(content["data"], content["layout"])
    shown.update_layout(template={"layout": _resolve(template, light)}, width=_WIDTH)
    drawn = shown.to_image(format="svg", width=_WIDTH, height=figure.layout.height).decode()
    return _with_themes(_compact(drawn), title, light, dark)


def _resolve(node: Any, colors: dict[str, str]) -> Any:
    """Return a part of a figure with its variables replaced by their colors."""
    if isinstance(node, dict):
        return {key: _resolve(child, colors) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return [_resolve(child, colors) for child in node]
    if isinstance(node, str) and node.startswith("var(--"):
        return colors[node[6:-1]]
    return node


def _compact(svg: str) -> str:
    """Replace repeated styles by classes, and round coordinates to tenths of a pixel."""
    styles: dict[str, str] = {}

    def to_class(match: re.Match[str]) -> str:
        style = match[1].strip()
        return f' class="{styles.setdefault(style, f"c{len(styles)}")}"' if style else ""

    svg = re.sub(r' (class|data-[\w-]+)="[^"]*"', "", svg)  # only Plotly's own scripts read them
    svg = re.sub(r' style="([^"]*)"', to_class, svg)
    svg = re.sub(r"(?<=\d\.\d)\d+(?=[^<>]*>)", "", svg)  # inside of tags
    rules = "".join(f".{name}{{{style}}}" for style, name in styles.items()).replace("&quot;", "'")
    return re.sub(r"(<svg[^>]*>)", rf"\1<style>{rules}</style>", svg, count=1)


def _with_themes(svg: str, title: str, light: dict[str, str], dark: dict[str, str]) -> str:
    """Replace the light colors by variables that follow the reader's theme, and add a background."""
    used = {}
    for name, color in light.items():
        if color.startswith("#") and _rgb(color) in svg:
            used[name] = color
            svg = svg.replace(_rgb(color), f"var(--{name})")
    used |= {name: light[name] for name in ("card", "line")}
    rules = [";".join(f"--{name}:{colors[name]}" for name in used) for colors in (light, dark)]
    style = f"<style>svg{{{rules[0]}}}@media(prefers-color-scheme:dark){{svg{{{rules[1]}}}}}</style>"
    width, height = (int(length) + 2 * _PADDING for length in re.findall(r'(?:width|height)="(\d+)"', svg)[:2])
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    start += f' viewBox="{-_PADDING} {-_PADDING} {width} {height}"><title>{escape(title)}</title>{style}'
    box = f'x="{0.5 - _PADDING}" y="{0.5 - _PADDING}" width="{width - 1}" height="{height - 1}" rx="12"'
    start += f'<rect {box} style="fill:var(--card);stroke:var(--line)"/>'
    return start + svg.partition(">")[2].strip() + "\n"


def _rgb(color: str) -> str:
    """Return a color as Plotly writes it: `#ff0000` is `rgb(255, 0, 0)`."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgb({red}, {green}, {blue})"
