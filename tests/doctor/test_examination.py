"""`doctor=true` as a command, and the time limits of its all-reduce."""

import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from src.doctor.finding import Finding
from src.doctor.report import Report
from src.launch import all_reduce
from src.utils.errors import UserError
from tests.support.commands import error_line, run, run_here

QUICK = ["doctor=true", "trainer.accelerator=cpu", "logger=none"]


def test_two_processes(small: list[str], tmp_path: Path) -> None:
    """Lightning would start the ranks of this strategy itself."""
    out, _ = run(*small, *QUICK, "strategy=ddp_spawn", "trainer.devices=2", f"run_dir={tmp_path / 'run'}")
    assert "problem" not in out.replace("no problem", "")
    assert "\nok      all-reduce     2 processes, 64 MiB in " in out
    assert "\nok      clocks " in out
    assert not (tmp_path / "run").exists()


def test_one_process_beside_a_run(small: list[str], tmp_path: Path) -> None:
    """It neither resumes a run in its folder nor removes what that run is saving."""
    part = tmp_path / "run" / "checkpoints" / ".last.ckpt.1.part"
    part.parent.mkdir(parents=True)
    part.touch()
    out, _ = run_here(*small, *QUICK, f"run_dir={tmp_path / 'run'}", "resume=auto")
    assert "\nok      all-reduce     one process" in out
    assert [file.name for file in (tmp_path / "run").rglob("*")] == ["checkpoints", part.name]


def test_problem_is_exit_code_1(small: list[str], tmp_path: Path) -> None:
    out, _ = run_here(*QUICK, "data=folder", f"data.root={tmp_path}", f"run_dir={tmp_path / 'run'}", code=1)
    assert "\nproblem data           data.root=" in out
    assert out.endswith("1 problem\n")
    assert not (tmp_path / "run").exists()


def test_refuses_sweeps(tmp_path: Path) -> None:
    _, err = run_here("-m", "doctor=true", "seed=0,1", f"hydra.sweep.dir={tmp_path}", code=1)
    assert error_line(err) == "error: doctor=true checks a single run: leave out -m"


def test_other_ranks_print_only_problems(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(rank=3)
    report.add(Finding("data", True, "complete"))
    assert capsys.readouterr().out == ""
    report.add(Finding("data", False, "missing"))
    assert "problem data           rank 3 on " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        report.close()


def test_names_ranks_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "_TIMEOUT", 0.1)
    store = HashStore()
    store.set("arrived/2", "")
    with pytest.raises(UserError, match="rank 1, 3 has no tensor on its device after"):
        all_reduce._wait_for_ranks(store, 0, 4)


def test_communication_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> dict[str, float]:
        time.sleep(1)
        return {}

    monkeypatch.setattr(all_reduce, "_TIMEOUT", 0.1)
    with pytest.raises(UserError, match=r"2 processes by nccl has not ended .* NCCL_DEBUG=INFO shows where"):
        all_reduce._run_in_time(hang, "nccl", 2)


def test_wrong_sum_is_noticed() -> None:
    with pytest.raises(UserError, match="the sum of 1 ones is 0"):
        all_reduce._measure(torch.zeros(2), HashStore(), rank=0, world_size=1)


def test_different_versions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "_gather", lambda value: [value, ("2.6.0", (2, 21, 5))])
    with pytest.raises(UserError, match=r"rank 1 has torch 2.6.0 and NCCL \(2, 21, 5\), but rank 0 has"):
        all_reduce._check_versions()


def test_clock_difference_is_the_least_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([[0.0, 9.0], [0.0, 3.0], [0.0, 5.0], [0.0, 4.0], [0.0, 8.0]])
    monkeypatch.setattr(all_reduce, "_gather", lambda value: next(rounds))
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    assert all_reduce._clock_difference() == 3.0
