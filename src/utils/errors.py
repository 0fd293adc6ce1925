"""The one exception that becomes a line for the user instead of a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix; the message names the option and a solution."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The names most like `word`, as the end of an error message."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5) or [name for name in known if name.startswith(word)]
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known[:20])}"
