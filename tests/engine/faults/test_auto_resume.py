"""`resume=auto` and its treatment of corrupt checkpoints."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from onecurve.checkpoint.newest import newest_checkpoint
from onecurve.config.folder import run_folder, unique_name
from onecurve.records.events import read_events
from onecurve.records.files import CONFIG
from tests.support.commands import PARITY, TINY, error_line, run_here, slurm_task, steps
from tests.support.experiments import SHORT, SHORT_EPOCH
from tests.support.runs import compose, fit


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2000])


def flip_a_bit(file: Path) -> None:
    """Change one byte of a tensor in an archive that stays readable."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


@pytest.fixture(scope="module")
def run_of_seven_steps(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    fit(compose(folder, *small, *PARITY, *SHORT, "trainer.max_steps=7"))
    return folder


@pytest.fixture
def trained(run_of_seven_steps: Path, folder: Path) -> Path:
    """Return a copy of the run, for a test to damage."""
    return Path(shutil.copytree(run_of_seven_steps, folder))


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_finds_the_newest_complete_checkpoint(damage: Any, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = trained / "checkpoints"
    os.utime(checkpoints / "last.ckpt", (0, 0))  # times of modification do not count
    assert newest_checkpoint(trained) == checkpoints / "last.ckpt"
    damage(checkpoints / "last.ckpt")
    assert newest_checkpoint(trained) == checkpoints / "previous.ckpt"
    assert torch.load(checkpoints / "previous.ckpt")["global_step"] == SHORT_EPOCH
    assert ("last.ckpt is not a complete checkpoint" in capsys.readouterr().err) == (damage is not Path.unlink)
    damage(checkpoints / "previous.ckpt")
    assert newest_checkpoint(trained) == checkpoints / "best.ckpt"
    damage(checkpoints / "best.ckpt")
    assert newest_checkpoint(trained) is None


def test_same_command_starts_and_resumes(small: list[str], folder: Path) -> None:
    command = [*small, *TINY, "trainer.max_epochs=1", "logger=none", "resume=auto", f"run_dir={folder}"]
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / ".last.ckpt.7.part").write_text("left by a process that was killed while saving")
    (folder / "metrics.csv").write_text("step,epoch,train/loss\n0,0,1.0\n")  # and which had not saved before
    run_here(*command)
    assert steps(folder) == list(range(12))
    assert {file.name for file in (folder / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
    truncate(folder / "checkpoints" / "last.ckpt")
    save_as_an_earlier_version(folder / CONFIG)
    _, err = run_here(*command, "trainer.max_epochs=2")
    assert "last.ckpt is not a complete checkpoint" in err
    assert steps(folder) == list(range(23))
    _, err = run_here(*[word for word in command if word != "resume=auto"], code=1)
    assert "holds a run: add resume=auto" in error_line(err)
    _, err = run_here("resume=auto", f"run_dir={folder}", "trainer.accelerator=cpu", code=1)
    assert re.search("holds a run of .*data=shapes.*: give these options again, or ckpt_path=", error_line(err))
    start, *_, resume, _ = events = read_events(folder)
    assert [(event["event"], event["step"]) for event in events] == [
        ("start", 0),
        ("finished", 11),
        ("resume", 11),
        ("finished", 22),
    ]
    assert resume["command"][2:] == [*command, "trainer.max_epochs=2"]
    assert (start["strategy"], start["world_size"], start["hosts"], start["device"]) == ("single", 1, 1, "cpu")
    assert start["changes"]["trainer.max_epochs"] == "1"
    assert start["changes"]["model.hidden"] == "[16]"
    assert start["changes"].keys().isdisjoint({"run_dir", "resume", "callbacks.best.dirpath"})


def save_as_an_earlier_version(file: Path) -> None:
    """Rewrite a run's configuration with other defaults, and without what the program has added since."""
    saved: Any = OmegaConf.load(file)
    saved.module.label_smoothing = 0.3
    saved.logger = {"wandb": {"name": "run-1234"}}
    for name in ("command", "model", "tags"):
        del saved.runtime[name]
    OmegaConf.save(saved, file)


def test_slurm_job_finds_its_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder has the job's number, which it keeps when it is requeued."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    runs, new = str(tmp_path / "runs"), {"fit": True, "ckpt_path": None, "run_dir": None}
    other = new | {"resume": None}
    resumed, named = new | {"resume": "auto"}, new | {"resume": "auto", "run_dir": str(tmp_path / "named")}
    assert run_folder(runs, "a", _root_=OmegaConf.create(resumed)) == f"{runs}/slurm-7"
    assert run_folder(runs, "a", _root_=OmegaConf.create(named)) == str(tmp_path / "named")
    assert run_folder(runs, "a", _root_=OmegaConf.create(other)) == f"{runs}/a"
    assert unique_name() != unique_name()
    for name, value in slurm_task(1, port=1).items():
        monkeypatch.setenv(name, value)
    assert run_folder(runs, "a", _root_=OmegaConf.create(resumed)) == "."
