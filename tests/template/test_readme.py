"""Every `python train.py` line of the README and the docs works on little data, and links and targets exist.

Each line is composed and built, and those of the README are trained; `make test-all` trains all of them. The real
command line, sweeps, torchrun and run folders have tests in tests/engine/launch.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from onecurve.run.experiment import assemble, run_experiment
from onecurve.targets import build
from tests.support.commands import ROOT, run_here
from tests.support.pool import Pool
from tests.support.runs import compose, fit, fit_ranks

README = (ROOT / "README.md").read_text()
FOLLOWED = ("extending.md", "first_hour.md", "migration.md")  # tests/template/test_extending.py writes their files
GUIDE_FOLDER = ROOT / "docs" / "guide"  # whose commands tests/guide runs
PAGES = [file for file in sorted((ROOT / "docs").rglob("*.md")) if file.name not in FOLLOWED]
PAGES = [file for file in PAGES if GUIDE_FOLDER not in file.parents]
GUIDE = "\n".join([README, *(file.read_text() for file in PAGES)])
MODEL_OPTIONS = ("model", "experiment", "ckpt_path", "init_from")
TINY = ["trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "trainer.log_every_n_steps=1"]


def lines(text: str) -> list[list[str]]:
    """Return the words of each line of the text's shell blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line, comments=True) for line in "".join(blocks).replace("\\\n", " ").splitlines()]


def commands(text: str) -> list[tuple[str, ...]]:
    """Return the arguments of each different `train.py` line that trains."""
    found = [tuple(line[line.index("train.py") + 1 :]) for line in lines(text) if "train.py" in line]
    return [words for words in dict.fromkeys(found) if "plan=true" not in words and words != ("--help",)]


LINES = lines(GUIDE)
# `ddp_spawn` takes six seconds, and resnet18 on two processes as many; tests/engine/run/test_ema.py has FSDP.
TOO_LONG = ({"strategy=ddp_spawn"}, {"experiment=resnet18", "strategy=fsdp"})
TRAINED_HERE = [words for words in commands(README) if not any(part <= {*words} for part in TOO_LONG)]
TRAINED = [
    pytest.param(words, marks=[] if words in TRAINED_HERE else [pytest.mark.slow], id=" ".join(words))
    for words in commands(GUIDE)
]


@pytest.fixture(scope="session")
def finished_run(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with one epoch of two steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    fit(compose(folder, *small, "data.batch_size=16", *TINY, "trainer.max_epochs=1"))
    return folder


def first_job(words: tuple[str, ...]) -> list[str]:
    """Return the overrides of a sweep's first job. Sweeps themselves are tested in tests/engine/launch."""
    kept = [re.sub(r"=.*interval\(([^,]+),.*", r"=\1", word) for word in words if not word.startswith(("-m", "hydra"))]
    return [word if "[" in word else word.split(",")[0] for word in kept]


def fill_placeholders(words: list[str], finished_run: Path, folder: Path) -> list[str]:
    """Replace RUN_DIR by a copy of a finished run, and FOLDER by a folder with two images."""
    if any("RUN_DIR" in word for word in words):
        shutil.copytree(finished_run, folder / "run")
    (folder / "images").mkdir(parents=True)
    for color in ("red", "blue"):
        Image.new("RGB", (40, 30), color).save(folder / "images" / f"{color}.png")
    resolved = ("ckpt_path=", "init_from=")  # resolved by the launcher, which has its own tests
    run_of = {True: f"{folder}/run/checkpoints/last.ckpt", False: f"{folder}/run"}
    words = [word.replace("RUN_DIR/", f"{folder}/run/") for word in words]
    words = [word.replace("RUN_DIR", run_of[word.startswith(resolved)]) for word in words]
    return [word.replace("FOLDER", f"{folder}/images") for word in words]


@pytest.fixture
def overrides(words: tuple[str, ...], finished_run: Path, local_data: dict[str, list[str]], folder: Path) -> list[str]:
    """Return the documented overrides, changed to little data."""
    default = "brackets" if "experiment=brackets" in words else "shapes"
    dataset = next((word.removeprefix("data=") for word in words if word.startswith("data=")), default)
    data = local_data[dataset.partition(",")[0]]
    batch = [] if any(word.startswith("data.batch_size") for word in words) else ["data.batch_size=16"]
    kept = [word for word in first_job(words) if "trainer.max_epochs" not in word and "num_nodes" not in word]
    model = [] if any(word.startswith(MODEL_OPTIONS) for word in kept) else ["model.width=4"]
    return [*data, *fill_placeholders(kept, finished_run, folder), *model, *batch, *TINY, "trainer.max_epochs=1"]


@pytest.mark.parametrize("words", [words for words in commands(GUIDE) if words not in TRAINED_HERE], ids=" ".join)
def test_builds(overrides: list[str], folder: Path) -> None:
    trainer, module, data = assemble(compose(folder, "logger=wandb", *overrides))  # the default, with its options
    assert trainer.max_epochs == 1
    assert list(module.parameters())
    assert data.plain


@pytest.mark.parametrize("words", TRAINED)
def test_trains(overrides: list[str], pool: Pool, folder: Path) -> None:
    logger = ["logger=wandb"] if any(word.startswith("logger.wandb.") for word in overrides) else []
    cfg = compose(folder, *logger, *overrides)
    if cfg.fit:
        assert all("train/loss" in record.metrics for record in fit_ranks(cfg, pool))
    else:
        metrics = run_experiment(cfg).metrics
        assert "test/acc" in metrics or (folder / "predictions.csv").read_text().count("\n") == 3


def test_checkpoint_loads_without_the_training_code(small: list[str], folder: Path) -> None:
    """Run the code of docs/runs.md in a process without Lightning and Hydra."""
    record = fit(compose(folder, *small, *TINY, "data.batch_size=16", "trainer.max_epochs=1"))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "runs.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "torch.load" in block]
    code = "import sys\nsys.modules |= dict.fromkeys(['lightning', 'hydra', 'omegaconf', 'wandb'])\n" + code
    code = code.replace("RUN_DIR", str(folder)) + f"torch.save(net.state_dict(), {str(folder / 'loaded')!r})\n"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    loaded = torch.load(folder / "loaded")
    assert {f"net.{name}" for name in loaded} == set(record.final)
    assert all(torch.equal(record.final[f"net.{name}"], tensor) for name, tensor in loaded.items())


def test_recipe_table_has_the_right_sizes() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", (ROOT / "docs" / "training.md").read_text(), re.MULTILINE)
    assert len(rows) > 5
    for name, parameters in rows:
        with torch.device("meta"):
            net = build(compose(ROOT, f"experiment={name}").model)
        assert f"{sum(parameter.numel() for parameter in net.parameters()):,}" == parameters, name


@pytest.mark.slow
def test_documented_strategy_joins_the_parity_table(tmp_path: Path) -> None:
    """Add the file and the YAML of docs/strategies.md to a copy of the project."""
    guide = (ROOT / "docs" / "strategies.md").read_text()
    for folder in ("src", "conf", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (code,), (config,) = (
        re.findall(r"```python\n(.*?)```", guide, re.DOTALL),
        re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL),
    )
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "manual_ddp.py").write_text(code)
    (tmp_path / "conf" / "strategy" / "manual_ddp.yaml").write_text(config)
    table = ["tests/engine/parity/test_parity.py", "-k", "sgd and manual_ddp", "-m", "", "--rootdir", "."]
    result = subprocess.run([sys.executable, "-m", "pytest", *table], cwd=tmp_path, capture_output=True, text=True)
    # Two worlds, each without accumulation and with two and four batches; one of them in a short run as well.
    assert "7 passed, " in result.stdout, result.stdout[-2000:]


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {line[1] for line in LINES if line and line[0] == "make"}
    assert targets >= {"train", "test", "bench"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_make_says_first_that_it_installs(tmp_path: Path) -> None:
    """pip is quiet for minutes; here a program stands in for it."""
    (tmp_path / "engine").mkdir()
    for name in ("pyproject.toml", "engine/pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\necho called with $1 $2 $3\n")
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "--file", str(ROOT / "Makefile"), "ARGS=", "train"]
    variables = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}  # of `make test ARGS=`
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[0] == "Installing PyTorch and the other packages in .venv, once: this takes some minutes."
    assert "called with -m pip install" in lines
    assert lines[-1] == "called with train.py experiment=quickstart"


def test_links_exist() -> None:
    for path in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", README):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m (scripts[.\w]+)", GUIDE):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for page in (ROOT / "docs").rglob("*.md"):
        for path in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / path).exists(), (page.name, path)


SCRIPTS = [*(ROOT / "scripts").glob("[!_]*.py"), *(ROOT / "engine" / "dev").glob("[!_]*.py")]
PROGRAMS = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in SCRIPTS]
PROGRAMS += [f"engine.dev.{file.parent.name}" for file in (ROOT / "engine" / "dev").glob("*/__main__.py")]


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_every_script_has_help(program: str) -> None:
    out, _ = run_here("--help", program=program)
    assert "usage:" in out
