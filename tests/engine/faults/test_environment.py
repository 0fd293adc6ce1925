"""Faults of ports, data and commands."""

import shutil
import socket
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.support.commands import PARITY, TINY, TWO, error_line, free_port, run_here, slurm_task, start, wait_for_exit
from tests.support.runs import compose, fit


def test_error_names_a_port_in_use(small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the first of two tasks that srun starts."""
    taken = free_port()
    for name, value in slurm_task(0, taken).items():
        monkeypatch.setenv(name, value)
    with socket.socket() as other:
        other.bind(("", taken))
        other.listen()
        _, err = run_here(*small, *PARITY, *TWO, f"run_dir={folder}", code=1)
    assert f"cannot listen on port {taken} of this host" in error_line(err)
    assert "MASTER_PORT" in err


@pytest.mark.slow
def test_error_names_a_rank_with_another_configuration(small: list[str], folder: Path) -> None:
    port = free_port()
    rates = ["optimizer.lr=0.1", "optimizer.lr=0.2"]
    command = [*small, *PARITY, *TWO, f"run_dir={folder}"]
    both = [start(*command, rates[rank], **slurm_task(rank, port)) for rank in (0, 1)]
    printed = [wait_for_exit(process, 120) for process in both]
    assert [code for code, _, _ in printed] == [1, 1]
    assert "process 1 was started with another optimizer.lr than process 0" in error_line(printed[0][2])
    assert printed[1][2] == "", "only rank zero prints the error"


def test_run_survives_deletion_of_its_data(cifar: Path, tmp_path: Path) -> None:
    """Training, validation and test read the images from memory."""
    root = tmp_path / "data"
    shutil.copytree(cifar, root)
    gone = Remove(root)
    task = [f"data.root={root}", "data=cifar10", *TINY[:3], "trainer.max_epochs=1"]
    record = fit(compose(tmp_path / "run", *task), gone, test=True)
    assert not root.exists()
    assert set(record.metrics) >= {"val/acc", "test/acc"}


class Remove(L.Callback):
    """Delete a folder after the first step."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_batch_end(self, *_: Any) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
