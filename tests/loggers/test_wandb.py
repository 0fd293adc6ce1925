"""W&B runs online if a key is configured and offline otherwise, without a prompt."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from src.loggers.wandb import finish_run, wandb_logger
from src.run.experiment import run
from src.utils.errors import UserError
from tests.support.commands import TINY
from tests.support.commands import run as run_command
from tests.support.experiments import SHORT
from tests.support.runs import compose

# Each case runs in a fork, which need not import wandb again. It exits at once, since wandb's shutdown waits for its
# service, and once did so forever.
SCRIPT = """
import json, os, sys, wandb
from src.loggers.wandb import online_or_offline
for variables in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(variables)
        print(online_or_offline(), flush=True)
        os._exit(0)
    os.wait()
"""
KEY = "0123456789" * 4
Cases = list[tuple[dict[str, str], str]]
QUICK: Cases = [({}, "offline"), ({"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, "disabled")]
WITH_KEY: Cases = [({"WANDB_API_KEY": KEY}, "online")]  # wandb takes seconds to notice that there is no network


@pytest.mark.parametrize("cases", [QUICK, pytest.param(WITH_KEY, marks=pytest.mark.slow)], ids=["without", "with key"])
def test_mode_follows_the_credentials(cases: Cases, tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT, json.dumps([variables for variables, _ in cases])]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.stdout.split() == [expected for _, expected in cases], result.stderr


def test_refuses_an_unknown_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "onlin")
    with pytest.raises(UserError, match="WANDB_MODE=onlin: did you mean online"):
        wandb_logger("project", "id", "folder")


def test_wandb_does_not_change_how_a_run_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(exit_code: int) -> None:
        raise ConnectionResetError("its service died")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=object(), finish=fail))
    finish_run(succeeded=True)
    assert caplog.messages == ["wandb failed at the end of the run: ConnectionResetError: its service died"]


@pytest.mark.slow
def test_goes_offline_if_the_server_does_not_answer(small: list[str], tmp_path: Path) -> None:
    """The key is invalid, so the result is the same with a network."""
    task = [*small, *TINY, "logger=wandb", "trainer.devices=1", f"run_dir={tmp_path / 'run'}"]
    out, err = run_command(*task, WANDB_API_KEY=KEY, WANDB_MODE="online", HOME=str(tmp_path))
    assert "wandb cannot start online" in out + err
    assert list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))


def test_works_with_tensorboard(small: list[str], folder: Path) -> None:
    loggers = ["logger=[wandb,tensorboard]", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
    folder /= "two_loggers"  # the run's id must be unique in this process
    run(compose(folder, *small, *SHORT, "model=mlp", "model.hidden=[16]", *loggers, "test=false", quiet=False))
    assert list(folder.glob("wandb/*/*.wandb"))
    assert list(folder.glob("tensorboard/events.*"))
