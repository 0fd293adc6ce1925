"""Schedulers of torch, by `_target_`, learn the same after a restart; tests/engine/parity has them on any hardware."""

from pathlib import Path

import pytest
import torch
from torch import nn

from onecurve.checkpoint.optimizer_state import name_parameters
from onecurve.errors import UserError
from onecurve.run.experiment import run
from tests.support.comparison import check_resumed
from tests.support.experiments import SHORT_EPOCH, SHORT_RUN, SMALL_MLP, TORCH_SCHEDULES
from tests.support.runs import compose, fit


@pytest.fixture
def task(small: list[str]) -> list[str]:
    return [*small, *SHORT_RUN, *SMALL_MLP]


@pytest.mark.parametrize(
    ("schedule", "stop"), [("epoch", SHORT_EPOCH), ("two steps", SHORT_EPOCH + 2), ("plateau", SHORT_EPOCH)]
)
def test_resumes(schedule: str, stop: int, task: list[str], folder: Path) -> None:
    chosen = [*task, *TORCH_SCHEDULES[schedule], "trainer.max_steps=12", "trainer.max_epochs=3"]
    reference = fit(compose(folder / "full", *chosen))
    saves = f"callbacks.checkpoint.every_n_train_steps={stop}"
    fit(compose(folder / "part", *chosen, f"trainer.max_steps={stop}", saves))
    resumed = fit(compose(folder / "rest", *chosen, f"ckpt_path={folder}/part/checkpoints/last.ckpt"))
    check_resumed([resumed], reference, done=stop)


def test_the_plateau_lowers_the_learning_rate(task: list[str], folder: Path) -> None:
    run(compose(folder, *task, *TORCH_SCHEDULES["plateau"], "trainer.max_steps=15", "trainer.max_epochs=3"))
    rates = {line.split(",")[3] for line in (folder / "metrics.csv").read_text().splitlines()[1:]}
    assert len(rates) > 1


@pytest.mark.parametrize(("first", "second"), [("epoch", "plateau"), ("constant", "epoch")])
def test_refuses_to_resume_with_another_scheduler(first: str, second: str, task: list[str], folder: Path) -> None:
    chosen = TORCH_SCHEDULES | {"constant": []}
    run(compose(folder / "a", *task, *chosen[first], "trainer.max_steps=2"))
    with pytest.raises(UserError, match="another kind of `scheduler`"):
        run(compose(folder / "b", *task, *chosen[second], f"ckpt_path={folder}/a/checkpoints/last.ckpt"))


def test_names_refuse_what_no_checkpoint_could_restore() -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(UserError, match="group 0 of SGD has a parameter that is not in Linear"):
        name_parameters(torch.optim.SGD(other.parameters(), lr=1.0), net)
