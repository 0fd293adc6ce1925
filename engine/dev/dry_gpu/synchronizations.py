"""The record of host-device synchronizations, to which the stubs of this package report."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from engine.dev.shared.process import ROOT

_HIDDEN = ("/torch/_", "/torch/utils/_", "/torch/autograd/", "/engine/dev/dry_gpu/", "contextlib.py")


class Synchronizations:
    """Counts the synchronizations by their kind and lines of code, while `enabled`."""

    def __init__(self) -> None:
        self.enabled = False
        self.found: dict[str, int] = {}

    def report(self, kind: str) -> None:
        """Record that an operation of this kind makes the host wait for the device."""
        if self.enabled:
            wait = f"{kind} in {_lines_of_code()}"
            self.found[wait] = self.found.get(wait, 0) + 1

    @contextmanager
    def apart(self) -> Iterator[dict[str, int]]:
        """Record into a dictionary of its own."""
        found, self.found, self.enabled = self.found, {}, True
        try:
            yield self.found
        finally:
            self.found, self.enabled = found, False


def _lines_of_code() -> str:
    """Return the innermost four lines of the call stack, without the machinery of torch and of this package."""
    frames = [frame for frame in traceback.extract_stack() if not any(part in frame.filename for part in _HIDDEN)]
    return " < ".join(f"{_short(frame.filename)}:{frame.lineno}" for frame in reversed(frames[-4:]))


def _short(file: str) -> str:
    return file.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")


SYNCHRONIZATIONS = Synchronizations()
