"""A rank that dies is named, the stacks of a hang are shown, all end in bounded time, and a restart resumes."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from onecurve.errors import RankFailedError, UserError
from onecurve.launch import start as launching
from onecurve.records.events import read_events
from tests.support.commands import (
    PARITY,
    TORCHRUN,
    TRAIN,
    TWO,
    callback,
    ranks,
    run,
    run_here,
    slow,
    start,
    steps,
    wait_for_exit,
    wait_for_rows,
)
from tests.support.comparison import check_last_checkpoints
from tests.support.runs import compose, fit


@pytest.mark.slow
def test_error_names_a_killed_rank(small: list[str], folder: Path) -> None:
    process = start(*small, *PARITY, *TWO, slow(0.1), f"run_dir={folder}")
    wait_for_rows(folder, 3, process)
    os.kill(ranks(process.pid)[0], signal.SIGKILL)
    before = time.monotonic()
    code, _, err = wait_for_exit(process)
    assert code == 1
    assert time.monotonic() - before < 60
    assert "rank 0 died (Signal 9 (SIGKILL)" in err
    assert "rank0.log" in err


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_error_names_the_stacks_of_a_hang(strategy: str, small: list[str], folder: Path) -> None:
    """The other rank waits in a collective, which under FSDP raises an error when the hung rank ends first."""
    hang = [callback("HangOnRankOne"), f"strategy={strategy}"]
    _, err = run_here(*small, *PARITY, *TWO, *hang, f"run_dir={folder}", code=1)
    assert "took no step within launch.timeout: the logs in" in err
    assert "Traceback" not in err
    stacks = (folder / "logs" / "rank1.log").read_text()
    assert "support/callbacks.py" in stacks
    assert "in on_train_batch_start" in stacks


@pytest.mark.slow
def test_hung_single_process_ends(small: list[str], folder: Path) -> None:
    run(*small, *PARITY, slow(0.0), "+callbacks.slow.at=3", "launch.timeout=3", f"run_dir={folder}", code=1)
    assert "support/callbacks.py" in (folder / "logs" / "rank0.log").read_text()


@pytest.mark.slow
def test_error_names_a_stopped_rank(small: list[str], folder: Path) -> None:
    """It cannot write its stack, and reacts only to SIGKILL, which torch sends after half a minute."""
    process = start(*small, *PARITY, *TWO, slow(0.1), "launch.timeout=5", f"run_dir={folder}")
    wait_for_rows(folder, 3, process)
    os.kill(ranks(process.pid)[1], signal.SIGSTOP)
    code, _, err = wait_for_exit(process)
    assert code == 1
    assert "took no step within launch.timeout: the logs in" in err


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_restarts_from_the_last_checkpoint(devices: int, small: list[str], folder: Path) -> None:
    task = [*small, *PARITY, *TWO, f"trainer.devices={devices}", "callbacks.checkpoint.every_n_train_steps=1"]
    process = start(*task, callback("WaitForKills", at=8, kills=1), "launch.max_restarts=1", f"run_dir={folder}")
    wait_for_rows(folder, 5, process)
    os.kill(ranks(process.pid)[-1], signal.SIGKILL)
    code, out, err = wait_for_exit(process)
    assert code == 0, err[-3000:]
    assert f"rank {devices - 1} died" in err
    assert "restarting; 0 restarts left after this one" in err
    assert out.count("done: ") == 1
    events = read_events(folder)
    assert [event["event"] for event in events] == ["start", "killed", "restart", "resume", "finished"]
    assert events[1]["reason"].startswith(f"rank {devices - 1} died (Signal 9 (SIGKILL)")
    assert 0 < events[3]["step"] <= events[1]["step"]
    fit(compose(folder.parent / "uninterrupted", *small, *PARITY))
    check_last_checkpoints(folder, folder.parent / "uninterrupted")
    assert steps(folder) == [*range(20), 20]


@pytest.mark.slow
def test_no_rank_outlives_a_launcher_killed_during_startup(small: list[str], folder: Path) -> None:
    """The ranks have not yet asked the kernel to die with it; a fixture checks that none is left."""
    process = start(*small, *PARITY, *TWO, f"run_dir={folder}")
    while len(ranks(process.pid)) < 2 and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert wait_for_exit(process)[0] == -signal.SIGKILL


@pytest.mark.parametrize("program", [TRAIN, pytest.param(TORCHRUN, marks=pytest.mark.slow)])
def test_no_rank_outlives_its_launcher(program: tuple[str, ...], small: list[str], folder: Path) -> None:
    """The ranks would train for another half minute; a fixture checks that none is left."""
    process = start(*small, *PARITY, *TWO, slow(2), f"run_dir={folder}", program=program)
    wait_for_rows(folder, 1, process)
    if program == TRAIN:
        os.kill(ranks(process.pid)[1], signal.SIGSTOP)  # a rank in which no thread runs
    os.kill(process.pid, signal.SIGKILL)
    assert wait_for_exit(process, 10)[0] == -signal.SIGKILL


def configured(max_restarts: int) -> DictConfig:
    launch = {"max_restarts": max_restarts, "min_devices": 1, "elastic": False}
    return OmegaConf.create({"launch": launch, "trainer": {"devices": 2}, "strategy": {}, "run_dir": "nowhere"})


def test_user_errors_are_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []

    def fail(cfg: DictConfig, processes: int, job: Any) -> None:
        starts.append(processes)
        raise UserError("train/loss is nan")

    monkeypatch.setattr(launching, "_run_group", fail)
    with pytest.raises(UserError):
        launching.launch_workers(configured(5))
    assert starts == [2]


def test_a_negative_number_of_restarts_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []

    def fail(cfg: DictConfig, processes: int, job: Any) -> None:
        starts.append(processes)
        raise RankFailedError("rank 0 failed")

    monkeypatch.setattr(launching, "_run_group", fail)
    with pytest.raises(RankFailedError):
        launching.launch_workers(configured(-1))
    assert starts == [2]


BRANCHING = ["module._target_=tests.support.modules.Branching", "callbacks=none", "test=false", "launch.timeout=30"]
BRANCHING += ["bit_exact=true", "virtual_ranks=8"]


def test_error_names_a_layer_that_some_ranks_call(small: list[str], folder: Path) -> None:
    _, err = run_here(*small, *PARITY, *BRANCHING, *TWO, "strategy=fsdp", f"run_dir={folder}", code=1)
    error = (
        r"error: strategy=fsdp gathers a layer .*: rank (.) called (.*), but rank (.) called (.*)\. Call the same .*"
    )
    assert {*re.fullmatch(error, err.strip()).groups()} == {"0", "1", "layers.1", "head"}


@pytest.mark.slow
def test_a_layer_that_some_virtual_ranks_call_trains_with_ddp(small: list[str], folder: Path) -> None:
    run(*small, *PARITY, *BRANCHING, *TWO, f"run_dir={folder}")
