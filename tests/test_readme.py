"""Every `python train.py` line of the README and the docs does what it says, on little data; what they name exists.

Started inside these processes: the real command line, sweeps, torchrun and run folders have tests in tests/launch.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from src.experiment import build, run
from tests.pool import Pool
from tests.runs import compose, drives_all_devices, fit

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDE = "\n".join([README, *(file.read_text() for file in sorted((ROOT / "docs").glob("*.md")))])
BLOCKS = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
LINES = [shlex.split(line, comments=True) for line in "".join(BLOCKS).replace("\\\n", " ").splitlines()]
TRAIN = [line[line.index("train.py") + 1 :] for line in LINES if "train.py" in line]
TINY = ["trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "trainer.log_every_n_steps=1"]


def first_job(words: list[str]) -> list[str]:
    """The first job of a sweep: each option's first value; who runs it, and how, is tested in tests/launch."""
    words = [re.sub(r"=.*interval\(([^,]+),.*", r"=\1", word) for word in words if not word.startswith(("-m", "hydra"))]
    return [word if "[" in word else word.split(",")[0] for word in words]


def with_names(words: list[str], folder: Path, *task: str) -> list[str]:
    """The words, in place of RUN_DIR and FOLDER a run of one epoch and two pictures."""
    if any("RUN_DIR" in word for word in words):
        fit(compose(folder / "run", *task, *TINY, "trainer.max_epochs=1"))
    (folder / "pictures").mkdir(parents=True)
    for colour in ("red", "blue"):
        Image.new("RGB", (40, 30), colour).save(folder / "pictures" / f"{colour}.png")
    resolved = ("ckpt_path=", "init_from=")  # by the launcher, which has tests of its own
    run_of = {True: f"{folder}/run/checkpoints/last.ckpt", False: f"{folder}/run"}
    words = [word.replace("RUN_DIR/", f"{folder}/run/") for word in words]
    words = [word.replace("RUN_DIR", run_of[word.startswith(resolved)]) for word in words]
    return [word.replace("FOLDER", f"{folder}/pictures") for word in words]


@pytest.mark.parametrize("words", [list(words) for words in dict.fromkeys(map(tuple, TRAIN))], ids=" ".join)
def test_trains(words: list[str], small: list[str], cifar: Path, pool: Pool, folder: Path) -> None:
    if words == ["--help"]:
        assert subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, capture_output=True).returncode == 0
        return
    data = [f"data.root={cifar}"] if "data=cifar100" in words else small
    batch = [] if any(word.startswith("data.batch_size") for word in words) else ["data.batch_size=16"]
    words = [word for word in first_job(words) if "trainer.max_epochs" not in word and "num_nodes" not in word]
    words = with_names(words, folder, *small, "data.batch_size=16")
    cfg = compose(folder, *data, *words, *batch, *TINY, "trainer.max_epochs=2")
    if not cfg.fit:
        metrics = run(cfg)
        assert "test/acc" in metrics or (folder / "predictions.csv").read_text().count("\n") == 3
        return
    devices = cfg.trainer.devices
    alone = devices == 1 or drives_all_devices(cfg)
    records = [fit(cfg)] if alone else pool.run(devices, fit, cfg)
    assert all(set(record.metrics) >= {"train/loss", "lr"} for record in records)


def test_a_checkpoint_loads_without_the_training_code(small: list[str], folder: Path) -> None:
    """As the README says, in a process that has neither Lightning nor Hydra."""
    record = fit(compose(folder, *small, *TINY, "data.batch_size=16", "trainer.max_epochs=1"))
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = "import sys\nsys.modules |= dict.fromkeys(['lightning', 'hydra', 'omegaconf', 'wandb'])\n" + code
    code = code.replace("RUN_DIR", str(folder)) + f"torch.save(net.state_dict(), {str(folder / 'loaded')!r})\n"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    loaded = torch.load(folder / "loaded")
    assert {f"net.{name}" for name in loaded} == set(record.final)
    assert all(torch.equal(record.final[f"net.{name}"], tensor) for name, tensor in loaded.items())


def test_the_table_of_recipes_is_right() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", (ROOT / "docs" / "training.md").read_text(), re.MULTILINE)
    recipes = {file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml")} - {"quickstart", "parity", "gan"}
    assert {name for name, _ in rows} == recipes
    for name, parameters in rows:
        net = build(compose(ROOT, f"experiment={name}").model)
        assert f"{sum(parameter.numel() for parameter in net.parameters()):,}" == parameters, name


def test_the_strategy_of_the_guide_joins_the_parity_table(tmp_path: Path) -> None:
    """One file and one YAML, as docs/strategies.md has them, in a copy of the project."""
    guide = (ROOT / "docs" / "strategies.md").read_text()
    for folder in ("src", "conf", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (code,), (config,) = (
        re.findall(r"```python\n(.*?)```", guide, re.DOTALL),
        re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL),
    )
    (tmp_path / "src" / "strategies" / "by_hand.py").write_text(code)
    (tmp_path / "conf" / "strategy" / "by_hand.yaml").write_text(config)
    command = [sys.executable, "-m", "pytest", "tests/parity/test_parity.py", "-k", "sgd and by_hand"]
    result = subprocess.run([*command, "--rootdir", "."], cwd=tmp_path, capture_output=True, text=True)
    assert "2 passed" in result.stdout, result.stdout[-2000:]


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {line[1] for line in LINES if line and line[0] == "make"}
    assert targets >= {"train", "test", "bench"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_links_and_scripts_exist() -> None:
    for path in re.findall(r"\]\((?!http)([^)]+)\)", README) + re.findall(r"python (scripts/\w+\.py)", GUIDE):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\((?!http)([^)]+)\)", GUIDE.removeprefix(README)):
        assert (ROOT / "docs" / path).exists(), path
    for script in (ROOT / "scripts").glob("[!_]*.py"):
        result = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
        assert "usage:" in result.stdout
