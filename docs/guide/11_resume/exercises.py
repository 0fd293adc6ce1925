"""Exercises of chapter 11. Replace each `raise`, then run `python -m docs.guide.check 11`."""

import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Save = Callable[[Path, Iterable[bytes]], None]


def finish_time(work: float, interval: float, save: float, kills: list[float]) -> float:
    """Return the time at which a run that is killed and started again has done all its work.

    Args:
        work: seconds of training that the run needs.
        interval: seconds of training between two checkpoints; there is none after the last second of work.
        save: seconds in which a checkpoint is written and nothing is trained.
        kills: the times of the kills, in ascending order. The run starts again at once, from its last complete
            checkpoint.
    """
    raise NotImplementedError("Go from checkpoint to checkpoint. Does a kill come before this one is complete?")


def save_atomically(path: Path, parts: Iterable[bytes]) -> None:
    """Write the parts one after another into a file, whose earlier content stays until the new one is complete."""
    raise NotImplementedError("Write a file of another name in the same folder, flush it to the disk, and rename it.")


def check_finish_time(solution: Callable[[float, float, float, list[float]], float]) -> None:
    for kills, expected in [([], 12), ([7], 14), ([4.5], 16.5), ([7, 8], 15), ([3, 6, 9], 21), ([1, 12.5], 14.5)]:
        got = solution(10, 4, 1, list(kills))
        assert abs(got - expected) < 1e-9, f"killed at {kills}: got {got}, expected {expected}"


def check_save_atomically(solution: Save) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.ckpt"
        for parts, content in [([b"old ", b"run"], b"old run"), ([b"newer ", b"run"], b"newer run")]:
            solution(path, parts)
            assert path.read_bytes() == content, f"wrote {content!r}, the file has {path.read_bytes()!r}"
        child = multiprocessing.get_context("fork").Process(target=_save_and_die, args=(solution, path))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL, "the function has not read all parts"
        assert path.read_bytes() == b"newer run", f"killed while writing: the file has {path.read_bytes()!r}"


def _save_and_die(solution: Save, path: Path) -> None:
    solution(path, _parts_that_kill())


def _parts_that_kill() -> Iterator[bytes]:
    yield b"torn"
    signal.raise_signal(signal.SIGKILL)
    yield b" file"
