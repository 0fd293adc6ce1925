"""Each run logs its first and its last step, however long `trainer.log_every_n_steps` is."""

import csv
from pathlib import Path

import pytest

from tests.support.experiments import SHORT, SHORT_STEPS
from tests.support.runs import compose, fit

CLASSIFIER = ["experiment=parity", *SHORT, "trainer.accumulate_grad_batches=2"]
GAN = ["experiment=gan", "module.generator.width=4", "module.discriminator.width=4", *SHORT]


def losses(folder: Path) -> dict[int, str]:
    """Return the training losses in metrics.csv by step."""
    with (folder / "metrics.csv").open(newline="") as stream:
        return {int(row["step"]): row["train/loss"] for row in csv.DictReader(stream) if row["train/loss"]}


@pytest.mark.parametrize("task", [CLASSIFIER, GAN], ids=["classifier", "gan"])
def test_logs_the_first_and_the_last_step(task: list[str], small: list[str], tmp_path: Path) -> None:
    last = SHORT_STEPS - 1
    found = {}
    for interval in (1, 3):
        fit(compose(tmp_path / str(interval), *small, *task, f"trainer.log_every_n_steps={interval}"))
        found[interval] = losses(tmp_path / str(interval))
    assert list(found[1]) == list(range(SHORT_STEPS))
    assert found[3] == {step: found[1][step] for step in (0, 2, 5, last)}
