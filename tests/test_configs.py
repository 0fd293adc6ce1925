"""Every YAML under conf/ is composed, instantiated and trained with for two steps: a new one needs no new test."""

import re
from pathlib import Path

import pytest

from tests.pool import Pool
from tests.runs import CONF, NEED_GPUS, compose, drives_all_devices, fit

GROUPS = sorted(
    path.name for path in CONF.iterdir() if path.is_dir() and path.name not in ("hydra", "sweep")
)  # of Hydra, of W&B
FILES = [(group, file.stem) for group in GROUPS for file in sorted((CONF / group).glob("[!_]*.yaml"))]
CHOICES = [choice for choice in FILES if choice not in [("strategy", name) for name in NEED_GPUS]]
# As small as a run can be, and with data that needs no network; what a file itself is about stays as it is.
TINY = [
    "data.batch_size=8",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=1",
]


def _choose(group: str, choice: str) -> str:
    """A module or callback that an experiment asks for is trained with in that; other callbacks beside the default."""
    for file in (CONF / "experiment").glob("*.yaml"):
        if group in ("module", "callbacks") and re.search(rf"override /{group}:.*\b{choice}\b", file.read_text()):
            return f"experiment={file.stem}"
    return f"{group}=[default,{choice}]" if group == "callbacks" and choice != "default" else f"{group}={choice}"


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=[f"{group}={choice}" for group, choice in CHOICES])
def test_trains(group: str, choice: str, small: list[str], cifar: Path, pool: Pool, folder: Path) -> None:
    data = [f"data.root={cifar}"] if group == "data" and choice != "shapes" else small
    quiet = ["trainer.accelerator=cpu", *([] if group == "logger" else ["logger=none"])]
    choosing = _choose(group, choice)
    model = [] if choosing.startswith(("model=", "experiment=")) else ["model=mlp", "model.hidden=[16]"]
    chosen = [*data, *model, *quiet, choosing, *TINY]
    devices = 2 if group == "strategy" and choice != "auto" else 1
    cfg = compose(folder, *dict.fromkeys(chosen), f"trainer.devices={devices}", quiet=False)
    alone = devices == 1 or drives_all_devices(cfg)
    records = [fit(cfg)] if alone else pool.run(devices, fit, cfg)
    assert (folder / "metrics.csv").read_text().count("\n") >= 2
    assert (folder / "config.yaml").is_file()
    monitored = cfg.callbacks.best.monitor if cfg.callbacks.best else "train/loss"
    assert all(monitored in record.metrics for record in records)
