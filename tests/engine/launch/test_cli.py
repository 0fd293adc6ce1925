"""Details of the command line, tested without starting a process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from onecurve.config.command_line import quote
from onecurve.config.folder import remove_if_unused
from onecurve.config.resolve import run_and_sweep_id, source_revision
from onecurve.records.files import CONFIG
from tests.support.commands import ROOT, TINY, error_line, run_here
from tests.support.runs import compose


def test_warns_of_an_evaluation_of_random_weights(small: list[str], tmp_path: Path) -> None:
    _, err = run_here(*small, *TINY, "logger=none", "fit=false", f"run_dir={tmp_path / 'run'}")
    assert "warning: fit=false without ckpt_path or init_from: the weights are random" in err.splitlines()


def test_says_that_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onecurve", None)  # as if it were not installed
    _, err = run_here(code=1)
    assert "has no onecurve: run `make install`, then `source .venv/bin/activate`" in error_line(err)


def test_default_folders_are_those_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CIFAR_ROOT", raising=False)
    assert compose(tmp_path, "data=shapes").data.root == str(ROOT / "data")
    assert compose(tmp_path, "data=shapes", "data.root=typed").data.root == "typed"
    folders: Any = OmegaConf.load(ROOT / "conf" / "train.yaml").hydra
    for folder in (folders.run, folders.sweep):
        assert "${project_path:runs}" in OmegaConf.to_yaml(folder)


def test_drawn_seed_is_recorded_and_kept(small: list[str], tmp_path: Path) -> None:
    """Each way to continue the run gets the drawn seed; another one would be refused as another experiment."""
    tiny = [*small, *TINY, "logger=none", "callbacks=checkpoint", "test=false"]
    start = [*tiny, "seed=null", "tags=draft", "resume=auto", f"run_dir={tmp_path / 'run'}"]
    run_here(*start, "trainer.max_epochs=1")
    saved = OmegaConf.load(tmp_path / "run" / CONFIG)
    assert saved.seed > 0
    assert f"seed={saved.seed}" in saved.runtime.overrides
    assert "seed=null" not in saved.runtime.overrides
    assert saved.tags == ["draft"]
    assert saved.runtime.tags == ["draft", "single", "x1", "mlp"]
    run_here(*start)
    _, err = run_here(f"ckpt_path={tmp_path / 'run'}", "trainer.max_epochs=3")
    _, err = run_here(f"ckpt_path={tmp_path / 'run'}", "trainer.max_epochs=2", code=1)
    assert "trainer.max_epochs=2: the run in ckpt_path has already trained 3 epochs" in error_line(err)
    assert OmegaConf.load(tmp_path / "run" / CONFIG).seed == saved.seed
    run_here(*tiny, "seed=null", "trainer.max_steps=1", f"run_dir={tmp_path / 'other'}")
    assert OmegaConf.load(tmp_path / "other" / CONFIG).seed != saved.seed


def test_refused_run_removes_only_its_own_folder(tmp_path: Path) -> None:
    for name, file in (("refused", "logs/rank0.log"), ("another", CONFIG)):
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).touch()
        remove_if_unused(tmp_path / name)
    assert [folder.name for folder in tmp_path.iterdir()] == ["another"]


def test_equal_folder_names_have_different_run_ids(tmp_path: Path) -> None:
    ids = {run_and_sweep_id(tmp_path / parent / "exp1", is_sweep=False)[0] for parent in ("a", "b")}
    assert len(ids) == 2
    assert all(run_id.startswith("exp1-") for run_id in ids)


@pytest.mark.parametrize("value", ["a b", "it's", r"a\b", "plain,{["])
def test_quoted_values_reach_hydra_unchanged(value: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"option={quote(value)}"])
    assert override.value() == value


def test_ranks_above_zero_remove_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    remove_if_unused(tmp_path)
    assert tmp_path.is_dir()


def test_several_hosts_need_a_launcher_on_each(small: list[str], folder: Path) -> None:
    """The message has the command; options with special characters are quoted."""
    words = ["strategy=ddp", "trainer.num_nodes=2", "trainer.devices=4", "trainer.accelerator=cpu", "tags=[a b]"]
    _, err = run_here(*words, *small, f"run_dir={folder}", code=1)
    torchrun = "torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py"
    assert f"{torchrun} {' '.join(words[:-1])} 'tags=[a b]'" in error_line(err)
    assert not folder.exists()


def test_compare_refuses_folders_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,val/acc\n0,0.5\n")
    for words, hint in (
        (["nowhere"], "nowhere is no run folder"),
        ([str(tmp_path), "--metric=val/los"], "none logged"),
    ):
        _, err = run_here(*words, program="scripts.compare", code=1)
        assert hint in err
        assert err.count("\n") == 1


def test_no_warning_where_validation_is_off_on_purpose(small: list[str], folder: Path) -> None:
    words = [*small, *TINY, "logger=none", "trainer.devices=1", "trainer.enable_progress_bar=false"]
    out, err = run_here("debug=overfit", *words, f"run_dir={folder}")
    assert "done: " in out
    assert "Total length" not in out + err


def test_revision_is_read_without_writing_to_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A lock of the index could fail a command of the user."""

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=me", "-c", "user.email=me@localhost", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr("onecurve.config.resolve.PROJECT", tmp_path)
    assert source_revision() == (None, False)
    git("init")
    (tmp_path / "source.py").write_text("")
    assert source_revision() == (None, True)
    git("add", ".")
    git("commit", "--message=first")
    os.utime(tmp_path / "source.py", (1, 1))  # git looks at the content again, and would note the new time
    index = (tmp_path / ".git" / "index").read_bytes()
    assert source_revision() == (git("rev-parse", "HEAD"), False)
    assert (tmp_path / ".git" / "index").read_bytes() == index
    (tmp_path / "new.py").write_text("")
    assert source_revision() == (git("rev-parse", "HEAD"), True)
