"""Hung ranks are identified by the stacks that watchdogs leave in their logs."""

import json
from pathlib import Path

import pytest

from src.launch.failures import first_error
from src.utils.rank_log import batches_file, log_file

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
    ("innermost", "batches", "raised", "named"),
    [
        ([WAITING, BUSY], [7, 7], False, [1]),
        ([None, BUSY], [7, 7], True, [1]),  # lost its peer before its own timeout
        ([None, BUSY], [7, 7], False, [0, 1]),  # rank 0 is stopped or stuck in the kernel; rank 1 may wait on a GPU
        ([None, BUSY], [7, 8], False, [0]),  # the host of rank 1 was ahead of its GPU
        ([None, WAITING], [7, 7], False, [0]),
        ([WAITING, WAITING], [7, 7], False, [0, 1]),
        ([WAITING, WAITING], [8, 7], False, [1]),  # in different collectives
        ([BUSY, BUSY], [7, 7], False, [0, 1]),
        ([BUSY, BUSY], [8, 7], False, [1]),
        ([WAITING, BUSY], [7, 8], False, [1]),  # which waits for nobody, so that rank 0 waits for it
        ([BUSY, BUSY], [None, None], False, [0, 1]),  # before the first batch
    ],
)
def test_names_hung_ranks(
    innermost: list[str | None], batches: list[int | None], raised: bool, named: list[int], tmp_path: Path
) -> None:
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
        if batches[rank] is not None:
            batches_file(tmp_path, rank).write_text(f"{batches[rank]:>12}\n")
    error = str(first_error(Failed(tmp_path / "errors"), str(tmp_path), {}))
    most = max(number or 0 for number in batches)
    places = {rank: f"rank {rank} hangs at batch {batches[rank] or 0} of {most};" for rank in range(2)}
    assert [rank for rank, place in places.items() if place in error] == named
