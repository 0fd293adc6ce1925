"""The GPU check runs its cases on a CPU, notices wrong outcomes, and survives cases that fail."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine.dev.gpu_check import numbers
from engine.dev.gpu_check.__main__ import run_case
from engine.dev.gpu_check.bits import expect_equal_bits
from engine.dev.gpu_check.case import Case, CheckFailedError, Session
from engine.dev.gpu_check.cases import cases
from engine.dev.gpu_check.runs import expect_equal
from engine.dev.shared.process import TIMED_OUT, Command, run_together
from onecurve.run.result import Result
from tests.support.commands import ROOT, run_here, wait_until

SLEEP = "import os, sys, time; open(sys.argv[1] + '/pid', 'w').write(str(os.getpid())); time.sleep(600)"


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session("cpu", 2, tmp_path)


def result(folder: Path, loss: float, weight: float) -> Result:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.csv").write_text(f"step,train/loss\n1,{loss!r}\n")
    torch.save({"state_dict": {"w": torch.tensor([weight])}}, folder / "checkpoints" / "last.ckpt")
    return Result({}, folder)


def test_writes_a_table(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    run_here("--accelerator", "cpu", "--only", "hashes", "--output", str(page), program="engine.dev.gpu_check.__main__")
    assert "| hashes | ok | " in page.read_text()


@pytest.mark.slow
def test_a_case_that_hangs_or_dies_fails_alone(session: Session) -> None:
    hung = run_case(Case("hashes", numbers.hashes, limit=0.1), session)
    assert (hung.verdict, hung.figure[:23]) == ("FAILED", "not finished within 0.1")
    died = run_case(Case("unknown", numbers.hashes), session)
    assert (died.verdict, died.figure[:12]) == ("FAILED", "ended with 1")


def test_a_check_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    command = (
        f"run_limited([{sys.executable!r}, '-c', {SLEEP!r}, {str(tmp_path)!r}], Path({str(tmp_path / 'log')!r}), 600)"
    )
    program = f"from pathlib import Path; from engine.dev.shared.process import *; exit_on_sigterm(); {command}"
    outer = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    assert wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", 100)
    outer.terminate()
    assert outer.wait(100) == 128 + signal.SIGTERM
    inner = Path("/proc") / (tmp_path / "pid").read_text()
    assert wait_until(lambda: not inner.exists(), 100)


def test_the_other_command_is_ended_when_one_fails(tmp_path: Path) -> None:
    programs = [[sys.executable, "-c", SLEEP, str(tmp_path)], [sys.executable, "-c", "raise SystemExit(3)"]]
    commands = [Command(program, tmp_path / f"{number}.log") for number, program in enumerate(programs)]
    start = time.monotonic()
    assert run_together(commands, 600) == [TIMED_OUT, 3]
    assert time.monotonic() - start < 300


def test_cases_have_different_names() -> None:
    for devices in (1, 2, 4, 8):
        names = [case.name for case in cases(Session("gpu", devices, Path()))]
        assert len(names) == len(set(names))
    assert {"ddp-x2-shared", "bits-fsdp-x2-shared"} <= {case.name for case in cases(Session("gpu", 1, Path()))}
    assert {"hsdp-x8", "bits-ddp-x2", "pipeline-x4", "dp", "stop-torchrun"} <= set(names)


@pytest.mark.parametrize(("loss", "weight"), [(1 + 1e-6, 1.0), (1.0, 1 + 1e-6), (1.0, float("nan"))])
def test_different_runs_are_noticed(loss: float, weight: float, tmp_path: Path) -> None:
    expected = result(tmp_path / "a", 1.0, 1.0)
    assert expect_equal(result(tmp_path / "b", 1.0, 1.0), expected) == "0e+00"
    with pytest.raises(CheckFailedError, match="relative difference"):
        expect_equal(result(tmp_path / "c", loss, weight), expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--accelerator", "cpu", "--only", "nothing"], "--only nothing matches no case; there are short-run, hashes"),
        *([] if torch.cuda.is_available() else [([], "torch finds no NVIDIA GPU")]),
    ],
)
def test_errors_are_one_line(words: list[str], message: str) -> None:
    _, err = run_here(*words, program="engine.dev.gpu_check.__main__", code=1)
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("tensor", "text"), [(1.0 + 1e-7, "1.0"), (1.0, "1.00")])
def test_different_bits_are_noticed(tensor: float, text: str, tmp_path: Path) -> None:
    runs = [result(tmp_path / name, 1.0, 1.0) for name in "ab"]
    for one in runs:
        content = {"state_dict": {"w": torch.tensor([1.0])}, "optimizer_states": []}
        torch.save(content, one.folder / "checkpoints" / "last.ckpt")
    assert expect_equal_bits(runs[0], runs[1], "run") == 3
    (runs[0].folder / "metrics.csv").write_text(f"step,train/loss\n1,{text}\n")
    content["state_dict"] = {"w": torch.tensor([tensor])}
    torch.save(content, runs[0].folder / "checkpoints" / "last.ckpt")
    with pytest.raises(CheckFailedError, match=r"train/loss is 1.00, 1.0 expected|1 of 1 tensors differ, such as w"):
        expect_equal_bits(runs[0], runs[1], "run")


@pytest.mark.slow
def test_two_ranks_of_one_device(tmp_path: Path) -> None:
    shared = ["--devices", "1", "--only", "^ddp-x2-shared|^bits-pipeline-x2-shared", "--jobs", "2"]
    out, _ = run_here("--accelerator", "cpu", *shared, program="engine.dev.gpu_check.__main__")
    assert out.count(" | ok | ") == 2


@pytest.mark.slow
def test_every_case_runs_on_a_cpu(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    out, _ = run_here("--accelerator", "cpu", "--output", str(page), program="engine.dev.gpu_check.__main__")
    assert out.count(" | not here | ") == 2  # dp, and the waits for a GPU
