"""A case of the check: a function that returns its figure, or raises if the outcome is wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class NotHere(Exception):
    """The case cannot run on this machine; the message says why."""


class CheckFailedError(Exception):
    """The outcome of a case is wrong; the message says what was expected."""


@dataclass(frozen=True)
class Session:
    """What every case is given.

    Attributes:
        accelerator: `gpu`, or `cpu` to exercise the cases without a GPU.
        devices: number of GPUs, or of processes on a CPU.
        folder: the case's own empty folder; its siblings belong to the other cases.
    """

    accelerator: str
    devices: int
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.accelerator == "gpu"


@dataclass(frozen=True)
class Case:
    """A named check, which runs in a process of its own for at most `limit` seconds.

    A check of speed is `timed`: no other one runs at the same time.
    """

    name: str
    check: Callable[[Session], str]
    limit: float = 120
    timed: bool = False


def expect(condition: bool, message: str) -> None:
    """Raise CheckFailedError with the message unless the condition holds."""
    if not condition:
        raise CheckFailedError(message)
