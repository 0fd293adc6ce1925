"""The configuration of a run: the options that differ from the defaults first, then all of them."""

import re
import shlex
from typing import Any

from src.report.markup import Html, Markup, card, details, grid, table, text
from src.report.run_folder import RunFolder

_HIDDEN = "runtime."  # what the program has set


def settings(run: RunFolder) -> Html:
    """Return the tables of the configuration, and the command and revision of the newest start."""
    start = run.started
    changes = {name: pair for name, pair in (start.get("changes") or {}).items() if isinstance(pair, list)}
    rows = [(_code(name), _value(pair[0]), _value(pair[-1])) for name, pair in changes.items()]
    options = [(_code(name), _value(value)) for name, value in run.config.items() if not name.startswith(_HIDDEN)]
    parts = []
    if start.get("command"):
        command = text(shlex.join(map(str, start["command"])))
        parts.append(card("Command", f'<pre class="wrap">{command}</pre>{_revision(start)}', wide=True))
    if rows:
        parts.append(card("Changed from the defaults", table(("option", "default", "this run"), rows), wide=True))
    if options:
        parts.append(details(f"All {len(options)} options", card("", table(("option", "value"), options))))
    return grid(parts)


def _revision(start: dict[str, Any]) -> Html:
    if not start.get("revision"):
        return ""
    changed = ", with changes that are not committed" if start.get("modified") else ""
    return f"<p>source revision <code>{text(str(start['revision'])[:12])}</code>{changed}</p>"


def _code(name: str) -> Markup:
    """Return the name of an option, which a narrow screen breaks after its dots and underscores."""
    shown = re.sub("([._])", r"\1<wbr>", text(name))
    return Markup(f'<code class="name">{shown}</code>')


def _value(value: Any) -> Markup:
    return Markup(f"<code>{text('null' if value is None else str(value))}</code>")
