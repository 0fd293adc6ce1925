"""The exception that is shown to the user as one line, without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix; the message names the option and a solution."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: IPython calls this method, if it exists, instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


def similar_names(word: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that are similar to `word`, or those that begin with it."""
    names = sorted(names)
    return difflib.get_close_matches(word, names, n=3, cutoff=0.5) or [name for name in names if name.startswith(word)]


def suggest(word: str, names: Iterable[str]) -> str:
    """Return the end of an error message: the names similar to `word`, or all of them if none is."""
    names = sorted(names)
    if similar := similar_names(word, names):
        return f"did you mean {' or '.join(similar)}?"
    return f"known: {', '.join(names)}"


def nearest_options(name: str, options: Iterable[str]) -> str:
    """Return the end of an error message about an unknown option: those that end with its name, or similar ones."""
    options = set(options)
    names = sorted(option for option in options if option.endswith(f".{name}")) or similar_names(name, options)
    return f"did you mean {' or '.join(names)}?" if names else "python train.py --cfg job lists all"
