"""A private name of CPython."""

import atexit
from typing import Any


def run_exit_functions() -> None:
    """Call the functions of `atexit`, which a forked process does not (https://github.com/python/cpython/issues/83856)."""
    functions: Any = atexit
    functions._run_exitfuncs()
