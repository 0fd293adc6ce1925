"""Hung ranks are identified by the stacks that watchdogs leave in their logs."""

import json
from pathlib import Path

import pytest

from src.launch.failures import first_error
from src.utils.rank_log import log_file

WAITING, BUSY = "torch/distributed/c10d.py", "src/models/slow.py"


class Failed:
    """A stand-in for elastic's error about a rank that left no report."""

    exitcode, message, local_rank = 1, "exit code 1", 1

    def __init__(self, folder: Path, rank: int = 1) -> None:
        self.rank = rank
        self.error_file = str(folder / "1" / "error.json")

    def get_first_failure(self) -> tuple[int, "Failed"]:
        return self.rank, self


def test_names_the_global_rank(tmp_path: Path) -> None:
    """Elastic keeps the errors of a host's ranks in folders named by local rank."""
    report = tmp_path / "1" / "error.json"
    report.parent.mkdir()
    report.write_text(json.dumps({"message": {"message": "RuntimeError: no", "extraInfo": {"py_callstack": ""}}}))
    failed = Failed(tmp_path, rank=3)
    assert "rank 3 failed (RuntimeError: no)" in str(first_error(failed, str(tmp_path), {}))


@pytest.mark.parametrize(
    ("innermost", "raised", "named"),
    [
        ([WAITING, BUSY], False, [1]),
        ([None, BUSY], True, [1]),  # lost its peer before its own timeout
        ([None, BUSY], False, [0, 1]),  # rank 0 is stopped or stuck in the kernel; rank 1 may wait for it on a GPU
        ([None, WAITING], False, [0]),
        ([WAITING, WAITING], False, [0, 1]),
        ([BUSY, BUSY], False, [0, 1]),
    ],
)
def test_names_hung_ranks(innermost: list[str | None], raised: bool, named: list[int], tmp_path: Path) -> None:
    if raised:
        report = tmp_path / "errors" / "0" / "error.json"
        report.parent.mkdir(parents=True)
        message = {"message": "RuntimeError: connection closed by peer", "extraInfo": {"py_callstack": ""}}
        report.write_text(json.dumps({"message": message}))
    for rank, place in enumerate(innermost):
        log = log_file(tmp_path, rank)
        log.parent.mkdir(exist_ok=True)
        dump = f'Timeout (0:00:08)!\nThread 0x1 (most recent call first):\n  File "/{place}", line 1 in step\n'
        log.write_text(dump if place else "it begins\n")
    error = str(first_error(Failed(tmp_path / "errors"), str(tmp_path), {}))
    assert [rank for rank in range(2) if f"rank {rank} hangs" in error] == named
