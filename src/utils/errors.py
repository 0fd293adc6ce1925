"""The exception that is shown to the user as one line, without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix; the message names the option and a solution."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known names most similar to `word`, as the end of an error message."""
    known = sorted(known)
    similar = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    similar = similar or [name for name in known if name.startswith(word)]
    return f"did you mean {' or '.join(similar)}?" if similar else f"known: {', '.join(known[:20])}"
