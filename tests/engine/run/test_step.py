"""A batch of Lightning is an optimizer step: what counts batches does not see micro-batches."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

import onecurve
from onecurve.errors import UserError
from onecurve.run.experiment import run_experiment
from tests.support.bits import rows_of
from tests.support.comparison import TOLERANCE, check_resumed, distances
from tests.support.habits import VectorData
from tests.support.interruption import die
from tests.support.runs import compose, fit

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
OWN += ["trainer.log_every_n_steps=1", "trainer.max_epochs=2", "trainer.precision=64-true"]
COUNTING = [*OWN, "+module._target_=tests.support.habits.Counting", "+data._target_=tests.support.habits.VectorData"]


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_micro_batches_change_no_logged_value(optimizer: str, folder: Path) -> None:
    """Hooks and logs come once per step, with the complete gradient, and with the mean, sum, or maximum of passes."""
    words = [*COUNTING, f"+module.optimizer={optimizer}"]
    reference = fit(compose(folder / "one", *words))
    halved = fit(compose(folder / "two", *words, "trainer.accumulate_grad_batches=2"))
    assert max(distances(halved, reference)) < TOLERANCE
    ours, theirs = rows_of(folder / "two"), rows_of(folder / "one")
    assert len(theirs[0]) == 17
    for row, other in zip(ours, theirs, strict=True):
        assert row.keys() == other.keys()
        numbers = {name: float(value) for name, value in row.items()}
        assert numbers == pytest.approx({name: float(value) for name, value in other.items()}, rel=1e-6, abs=1e-6)


class Shorter(VectorData):
    """Has another number of batches in each epoch."""

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        return DataLoader(self._samples(150 - 32 * (self.trainer.current_epoch % 2), 0), self.batch_size, shuffle=True)


class ShortEpochs(L.LightningModule):
    """Ends each epoch after three batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(16, 3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (
            [
                "+module._target_=tests.engine.run.test_step.ShortEpochs",
                "+data._target_=tests.support.habits.VectorData",
            ],
            4,
        ),
        (
            [
                "+module._target_=tests.support.habits.Vectors",
                "+data._target_=tests.engine.run.test_step.Shorter",
                "+trainer.reload_dataloaders_every_n_epochs=1",
            ],
            6,
        ),
    ],
)
def test_epochs_of_different_lengths_resume(words: list[str], step: int, folder: Path) -> None:
    """The position in the data is kept, and not computed from the number of steps."""
    words = [*OWN, *words, "trainer.max_epochs=3"]
    reference = fit(compose(folder / "alone", *words))
    die(compose(folder / "died", *words), "on_train_batch_start", step)
    resumed = fit(compose(folder / "resumed", *words, f"ckpt_path={folder}/died/died.ckpt"))
    assert resumed.indices == reference.indices[step:]
    check_resumed([resumed], reference, done=step)


def test_refuses_a_changing_number_of_micro_batches(folder: Path) -> None:
    scheduler = "+callbacks.accumulation={_target_: lightning.pytorch.callbacks.GradientAccumulationScheduler, "
    with pytest.raises(
        UserError, match=r"GradientAccumulationScheduler changes .* set trainer.accumulate_grad_batches"
    ):
        run_experiment(compose(folder, *COUNTING, scheduler + "scheduling: {0: 2}}"))


class LogsAtReset(BoringModel):
    def optimizer_zero_grad(self, *args: Any) -> None:
        super().optimizer_zero_grad(*args)
        self.log("resets", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")


@pytest.mark.parametrize("options", [{"bit_exact": True}, {"accumulate_grad_batches": 2}])
def test_the_reset_of_gradients_logs_once(options: dict[str, Any], folder: Path) -> None:
    trainer = onecurve.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, seed=0, **options)
    trainer.fit(LogsAtReset(), DataLoader(RandomDataset(32, 64), batch_size=16))
    assert trainer.callback_metrics["resets"] == 4
