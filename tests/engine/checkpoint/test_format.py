"""Each file of a run names the version that wrote it, and checkpoint/format.py lists the keys of a checkpoint."""

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml

from onecurve.checkpoint.format import CHECKPOINT_KEYS, VERSION, VERSION_KEY
from onecurve.extras.jobs import Job
from onecurve.run.experiment import run_experiment
from tests.support.commands import ROOT
from tests.support.experiments import SHORT_RUN, SMALL_MLP
from tests.support.runs import compose

KEYS = {key: file for file, keys in CHECKPOINT_KEYS.items() for key in keys}


@pytest.mark.parametrize(
    "options", [[], ["callbacks=[default,ema]"], ["strategy=fsdp", "strategy.sharded_checkpoints=true"]]
)
def test_files_of_a_run(options: list[str], small: list[str], folder: Path) -> None:
    run_experiment(compose(folder, *small, *SHORT_RUN, *SMALL_MLP, *options, "test=false"))
    saved = torch.load(folder / "checkpoints" / "last.ckpt")
    assert saved.keys() <= KEYS.keys()
    assert {key for key in KEYS if KEYS[key] in ("run/recorder.py", "checkpoint/resumption.py")} <= saved.keys()
    start, *_ = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved[VERSION_KEY] == start[VERSION_KEY] == config[VERSION_KEY] == VERSION == version("onecurve")


def test_a_job_of_a_sweep_has_the_version(tmp_path: Path) -> None:
    Job([]).write(tmp_path)
    assert json.loads((tmp_path / "job.json").read_text())[VERSION_KEY] == VERSION


@pytest.mark.parametrize("file", [file for file in CHECKPOINT_KEYS if file != "Lightning"])
def test_the_named_file_writes_the_keys(file: str) -> None:
    source = (ROOT / (file if file.startswith("src") else f"engine/onecurve/{file}")).read_text()
    for key in CHECKPOINT_KEYS[file]:
        assert re.search(rf'["\']{key}["\']', source) or key == VERSION_KEY, key


def test_the_template_takes_this_version() -> None:
    assert f'"onecurve=={VERSION}"' in (ROOT / "pyproject.toml").read_text()
