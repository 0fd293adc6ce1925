"""Every `python train.py` line of the README does what it says, on little data; the files it names exist.

Started inside these processes: the real command line, sweeps, torchrun and run folders have tests in tests/launch.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from src.experiment import run
from tests.pool import Pool
from tests.runs import compose, drives_all_devices, fit

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
LINES = [shlex.split(line, comments=True) for line in "".join(BLOCKS).replace("\\\n", " ").splitlines()]
TRAIN = [line[line.index("train.py") + 1 :] for line in LINES if "train.py" in line]
TINY = ["trainer.limit_train_batches=1", "trainer.limit_val_batches=1", "trainer.log_every_n_steps=1"]


def first_job(words: list[str]) -> list[str]:
    """The first job of a sweep: each option's first value."""
    return [word if "[" in word else word.split(",")[0] for word in words if word != "-m"]


@pytest.mark.parametrize("words", TRAIN, ids=" ".join)
def test_trains(words: list[str], small: list[str], cifar: Path, pool: Pool, folder: Path) -> None:
    if words == ["--help"]:
        assert subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, capture_output=True).returncode == 0
        return
    data = [f"data.root={cifar}"] if "data=cifar100" in words else small
    batch = [] if any(word.startswith("data.batch_size") for word in words) else ["data.batch_size=16"]
    words = [word for word in first_job(words) if "trainer.max_epochs" not in word and "num_nodes" not in word]
    if "ckpt_path=RUN_DIR" in words:
        fit(compose(folder / "run", *data, *batch, *TINY, "trainer.max_epochs=1"))
        words = [word.replace("RUN_DIR", f"{folder}/run/checkpoints/last.ckpt") for word in words]
    cfg = compose(folder, *data, *words, *batch, *TINY, "trainer.max_epochs=2")
    devices = cfg.trainer.devices
    if not cfg.fit:
        assert "test/acc" in run(cfg)
        return
    alone = devices == 1 or drives_all_devices(cfg)
    records = [fit(cfg)] if alone else pool.run(devices, fit, cfg)
    assert all(set(record.metrics) >= {"train/loss", "lr"} for record in records)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {line[1] for line in LINES if line and line[0] == "make"}
    assert targets == {"train", "test"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_links_and_scripts_exist() -> None:
    for path in re.findall(r"\]\((?!http)([^)]+)\)", README) + re.findall(r"python (scripts/\w+\.py)", README):
        assert (ROOT / path).exists(), path
    for script in (ROOT / "scripts").glob("*.py"):
        result = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
        assert "usage:" in result.stdout
