"""Runs that were saved when a class had another path are continued and loaded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from src.engine import load_run
from src.engine.report.run_folder import RunFolder
from src.engine.state.jobs import Job
from src.engine.utils import targets
from src.engine.utils.targets import with_moved_targets
from tests.support.commands import TINY, run_here, steps


@pytest.fixture
def _moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "MOVED", {"src.nets": "src.models", "src.nets.big.Net": "src.models.vit.ViT"})


@pytest.mark.usefixtures("_moved")
def test_replaces_complete_names() -> None:
    saved = {"model": [{"_target_": "src.nets.mlp.mlp"}], "width": 3, "text": "my.src.nets.mlp src.nets2 src/nets"}
    assert with_moved_targets(saved) == saved | {"model": [{"_target_": "src.models.mlp.mlp"}]}
    assert with_moved_targets("+a={_target_: src.nets.big.Net}") == "+a={_target_: src.models.vit.ViT}"


@pytest.mark.usefixtures("_moved")
def test_reads_a_job_of_earlier_paths(tmp_path: Path) -> None:
    """The names in the mapping of its record stay as they are."""
    job = Job(["model._target_=src.nets.mlp.mlp"], "finished", "val/acc", 0.5, {"val/acc": 0.5})
    job.write(tmp_path)
    assert Job.read(tmp_path) == replace(job, overrides=["model._target_=src.models.mlp.mlp"])


@pytest.mark.usefixtures("_moved")
def test_goes_on_with_a_run_of_earlier_paths(small: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    task = [*small, *TINY, "model._target_=src.models.mlp.mlp", "logger=none", "test=false", "trainer.max_epochs=1"]
    run_here(*task, f"run_dir={folder}")
    config, last = folder / "config.yaml", folder / "checkpoints" / "last.ckpt"
    config.write_text(config.read_text().replace("src.models", "src.nets"))
    checkpoint = torch.load(last)
    checkpoint["config"] = checkpoint["config"].replace("src.models", "src.nets")
    options = checkpoint["experiment"]["options"]
    options |= {name: value.replace("src.models", "src.nets") for name, value in options.items() if "_target_" in name}
    torch.save(checkpoint, last)
    assert RunFolder(folder).config["model._target_"] == "src.models.mlp.mlp"
    assert load_run(folder).config.model._target_ == "src.models.mlp.mlp"
    run_here(f"ckpt_path={folder}", "trainer.max_epochs=2")
    assert steps(folder) == list(range(22)), "one experiment"
