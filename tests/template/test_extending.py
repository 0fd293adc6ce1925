"""Each recipe of docs/extending.md, first_hour.md and migration.md works: its files, its commands and its code.

A recipe is a section of the page. A block of code after a line with a file name belongs to that file; another block of
Python runs as it is. Commands run on little data, inside this process or on the ranks of the pool. RUN_DIR stands for
the folder of a run.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from omegaconf import DictConfig

import src.models
from onecurve import notebook
from onecurve.config.resolve import runs_in_single_process
from onecurve.run.experiment import run_experiment
from tests.support.commands import ROOT, run_here
from tests.support.pool import Pool
from tests.support.runs import QUIET, compose

TINY = ["data.batch_size=16", "trainer.max_epochs=1", "trainer.limit_train_batches=3", "trainer.log_every_n_steps=1"]
LIMITS = [f"trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")]
PAGES = "\n".join((ROOT / "docs" / name).read_text() for name in ("extending.md", "first_hour.md", "migration.md"))
OWN_DATA = ("data=", "experiment=brackets", "experiment=moons")
SECTIONS = {text.splitlines()[0]: text for text in PAGES.split("\n## ")[1:] if "```" in text}


def train(cfg: DictConfig, project: Path) -> dict[str, float]:
    """Run a configuration in a process that can import the recipe's files."""
    for search_path, folder in ((sys.path, str(project)), (src.models.__path__, f"{project}/src/models")):
        if folder not in search_path:
            search_path.insert(0, folder)
    return run_experiment(cfg).metrics


def run_script(line: str, project: Path) -> None:
    """Run a line `python -m scripts.NAME ...`, whose RUN_DIR is a folder of the project."""
    _, _, program, *words = shlex.split(line.replace("RUN_DIR", f"{project}/RUN_DIR"), comments=True)
    run_here(*words, program=program)


def write_files(text: str, project: Path) -> None:
    """Write the files of recipes."""
    for name, code in re.findall(r"^`([\w./]+)`:\n\n```(?:python|yaml)\n(.*?)```", text, re.M | re.S):
        file = project / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)


@pytest.fixture
def project(section: str, images: Path, hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the files of a recipe, and return their folder, which Python can import from; its `images` has data."""
    (tmp_path / "images").symlink_to(images)
    write_files(SECTIONS[section], tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(src.models, "__path__", [*src.models.__path__, f"{tmp_path}/src/models"])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if name == "my" or str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def test_the_page_of_commands_has_the_same_notebook() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "use.md").read_text(), re.S)
    assert code in SECTIONS["In a notebook"]


@pytest.mark.parametrize("section", SECTIONS)
def test_recipe(section: str, project: Path, small: list[str], pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "conf").mkdir(exist_ok=True)
    monkeypatch.setattr(notebook, "compose", partial(notebook.compose, *small, *QUIET, *LIMITS))
    if "RUN_DIR" in "".join(re.findall(r"```.*?```", SECTIONS[section], re.S)):
        notebook.train(notebook.compose("model=mlp", *TINY, f"run_dir={project}/RUN_DIR"))
    for block in re.findall(r"```bash\n(.*?)```", SECTIONS[section], re.S):
        for number, line in enumerate(block.replace("\\\n", " ").splitlines()):
            if "-m scripts." in line:
                run_script(line, project)
                continue
            words = shlex.split(line, comments=True)[2:]  # after `python train.py`
            data = [] if any(word.startswith(OWN_DATA) for word in words) else small
            search = f"hydra.searchpath=[file://{project}/conf]"
            cfg = compose(project / f"run{number}", *data, *TINY, *words, search)
            if cfg.trainer.devices == 1 or runs_in_single_process(cfg):
                metrics = train(cfg, project)
            else:
                metrics = pool.run(cfg.trainer.devices, train, cfg, project)[0]
            assert metrics
    for code in re.findall(r"(?<!`:\n\n)```python\n(.*?)```", SECTIONS[section], re.S):
        exec(compile(code, section, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_own_files_are_checked_but_not_trained(tmp_path: Path) -> None:
    """Write the files of all recipes, and an experiment without its data, into a copy of the project."""
    for folder in ("src", "conf", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    write_files(PAGES, tmp_path)
    recipe = "# @package _global_\ndefaults: [override /data: npz]\ndata: {source: {file: nowhere.npz}}\n"
    (tmp_path / "conf" / "experiment" / "own.yaml").write_text(recipe)
    command = [sys.executable, "-m", "pytest", "tests/template/test_configs.py", "-v", "--rootdir", ".", "-m", ""]
    names = "own or pets or hub or mine or inverse_sqrt or weight_norm or jsonl"
    result = subprocess.run([*command, "-k", names], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:]
    assert all(f"test_builds[{choice}]" in result.stdout for choice in ("data=pets", "module=mine", "experiment=own"))
    assert set(re.findall(r"::test_(\w+)", result.stdout)) == {"builds"}
