"""Each run logs its first and its last step, however long `trainer.log_every_n_steps` is."""

from pathlib import Path

import pytest

from tests.support.comparison import read_rows
from tests.support.experiments import SHORT, SHORT_STEPS
from tests.support.runs import compose, fit

CLASSIFIER = ["experiment=parity", *SHORT, "trainer.accumulate_grad_batches=2"]
GAN = ["experiment=gan", "module.generator.width=4", "module.discriminator.width=4", *SHORT]


@pytest.mark.parametrize("task", [CLASSIFIER, GAN], ids=["classifier", "gan"])
def test_logs_the_first_and_the_last_step(task: list[str], small: list[str], tmp_path: Path) -> None:
    last = SHORT_STEPS - 1
    found = {}
    for interval in (1, 3):
        fit(compose(tmp_path / str(interval), *small, *task, f"trainer.log_every_n_steps={interval}"))
        rows = read_rows(tmp_path / str(interval))
        found[interval] = {int(row["step"]): row["train/loss"] for row in rows if row["train/loss"]}
    assert list(found[1]) == list(range(SHORT_STEPS))
    assert found[3] == {step: found[1][step] for step in (0, 2, 5, last)}
