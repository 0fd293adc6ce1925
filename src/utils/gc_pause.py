"""Imports without garbage collection, which would look through all that is imported again and again."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect nothing meanwhile, and never look at what is there by then: it takes half a second of a start.

    torch and Lightning are some hundred thousand objects, and stay.
    """
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        gc.enable()
