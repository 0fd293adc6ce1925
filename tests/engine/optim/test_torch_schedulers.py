"""Schedulers of torch, by `_target_`, learn the same after a restart; tests/engine/parity has them on any hardware."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader

import onecurve
from onecurve.checkpoint.optimizer_state import merge, name_parameters, shard
from onecurve.errors import UserError
from onecurve.run.experiment import run_experiment
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
    run_experiment(compose(folder, *task, *TORCH_SCHEDULES["plateau"], "trainer.max_steps=15", "trainer.max_epochs=3"))
    rates = {line.split(",")[3] for line in (folder / "metrics.csv").read_text().splitlines()[1:]}
    assert len(rates) > 1


@pytest.mark.parametrize(("first", "second"), [("epoch", "plateau"), ("constant", "epoch")])
def test_refuses_to_resume_with_another_scheduler(first: str, second: str, task: list[str], folder: Path) -> None:
    chosen = TORCH_SCHEDULES | {"constant": []}
    run_experiment(compose(folder / "a", *task, *chosen[first], "trainer.max_steps=2"))
    with pytest.raises(UserError, match="another kind of `scheduler`"):
        run_experiment(compose(folder / "b", *task, *chosen[second], f"ckpt_path={folder}/a/checkpoints/last.ckpt"))


def test_names_refuse_what_no_checkpoint_could_restore() -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(UserError, match="group 0 of SGD has a parameter that is not in Linear"):
        name_parameters(torch.optim.SGD(other.parameters(), lr=1.0), net)


class Groups(BoringModel):
    """Has a parameter group for each of its weights, or a single one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def configure_optimizers(self) -> Any:
        weights = [*self.parameters()]
        return torch.optim.SGD(
            [{"params": weights}] if self.count == 1 else [{"params": [one]} for one in weights], 0.1
        )


@pytest.mark.parametrize(("count", "names"), [(1, ["lr-SGD"]), (2, ["lr-SGD/group 00", "lr-SGD/group 01"])])
def test_the_rate_of_a_single_group_has_the_name_that_lightning_gives(
    count: int, names: list[str], folder: Path
) -> None:
    trainer = onecurve.Trainer(
        max_steps=1,
        accelerator="cpu",
        callbacks=LearningRateMonitor(),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Groups(count), DataLoader(RandomDataset(32, 8), batch_size=8))
    assert [name for name in trainer.callback_metrics if name.startswith("lr")] == names


@pytest.mark.parametrize("saved", [{}, {"name": "group 00"}], ids=["now", "before"])
def test_the_state_of_a_single_group_travels(saved: dict[str, str]) -> None:
    """Files of earlier versions name it, and a stage of a pipeline may have a second group."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [module.weight]}], lr=1.0)
    name_parameters(optimizer, module)
    state = optimizer.state_dict()
    state["param_groups"][0] |= saved
    assert [group["param_names"] for group in shard(state, optimizer)["param_groups"]] == [["weight"]]
    longer = nn.Sequential(nn.Linear(2, 2))
    other = torch.optim.SGD([{"params": [longer[0].weight]}, {"params": [longer[0].bias]}], lr=1.0)
    name_parameters(other, longer)
    merged = merge([state, other.state_dict()], ["weight", "0.weight", "0.bias"])
    assert [group["param_names"] for group in merged["param_groups"]] == [["weight", "0.weight"], ["0.bias"]]
