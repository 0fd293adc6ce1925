"""A student that learns from its own moving average learns the same on ranks, with the habits of published code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onecurve.errors import UserError
from onecurve.run.experiment import run_experiment
from tests.support.comparison import TOLERANCE, distances
from tests.support.habits import Vectors
from tests.support.pool import Pool
from tests.support.runs import compose, fit, fit_ranks

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
OWN += ["trainer.log_every_n_steps=1", "trainer.max_epochs=2", "+data._target_=tests.support.habits.VectorData"]
OWN += ["trainer.precision=64-true"]
TWO = "trainer.devices=2"
SELF_DISTILLING = [*OWN, f"+module._target_={__name__}.SelfDistilling"]


class SelfDistilling(Vectors):
    """Gives the teacher new memory in each step, one of its tensors the whole value, and a layer a later start."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.mean(x, y, batch_idx) + self.distillation(x, y, batch_idx)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def on_after_backward(self) -> None:
        if self.current_epoch == 0:
            for weight in self.net[-1].parameters():
                weight.grad = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for student, teacher in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            teacher.data = 0.9 * teacher.data + 0.1 * student.data
        (*_, bias) = self.teacher.parameters()
        bias.data = torch.full(bias.shape, 0.01 * batch_idx, dtype=bias.dtype)

    def on_validation_start(self) -> None:
        """Validate with the weights of the teacher."""
        self.own = [weight.data for weight in self.net.parameters()]
        for student, teacher in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            student.data = teacher.data.clone()

    def on_validation_end(self) -> None:
        for weight, data in zip(self.net.parameters(), self.own, strict=True):
            weight.data = data


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_learns_the_same_on_ranks(strategy: str, pool: Pool, folder: Path) -> None:
    one = fit(compose(folder / "one", *SELF_DISTILLING))
    for record in fit_ranks(compose(folder / "two", *SELF_DISTILLING, f"strategy={strategy}", TWO), pool):
        assert max(distances(record, one)) < TOLERANCE


class MovesInStep(SelfDistilling):
    """Moves the teacher before each pass: as it begins as a copy of the student, not in the first step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for student, teacher in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            teacher.data = 0.5 * (teacher.data + student.data)
        return self.distillation(batch[0], batch[1], batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Leave the teacher alone."""


@pytest.mark.parametrize("divided", ["bit_exact=true", "trainer.accumulate_grad_batches=2"])
def test_a_teacher_that_moves_in_each_pass(divided: str, folder: Path) -> None:
    words = [*OWN, f"+module._target_={__name__}.MovesInStep", divided]
    message = r"the frozen weight teacher\..* changes in training_step, .* on_train_batch_end"
    with pytest.raises(UserError, match=message):
        run_experiment(compose(folder, *words))
