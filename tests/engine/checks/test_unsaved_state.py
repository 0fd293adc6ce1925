"""What training changes and no checkpoint holds is named when one is saved."""

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.support.habits import Vectors
from tests.support.interruption import SaveOnce
from tests.support.runs import compose, fit

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=default", "callbacks.best=null"]
OWN += ["test=false", "trainer.max_epochs=1", "+data._target_=tests.support.habits.VectorData"]


class Average:
    """The rate of a moving average, which grows."""

    def __init__(self) -> None:
        self.rate, self.name = 0.9, "teacher"


class Teacher(L.Callback):
    """A rate again, of a callback that the module calls itself."""

    def __init__(self) -> None:
        self.rate = 0.9


class Changing(Vectors):
    """Changes attributes and buffers of several kinds in its hooks."""

    bank: Tensor
    saved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.average, self.width, self.outputs, self.total = Average(), 32, list[Tensor](), float("nan")
        self.teacher_callback = Teacher()
        self.register_buffer("bank", torch.zeros(2), persistent=False)
        self.register_buffer("saved", torch.zeros(2))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.normed = nn.utils.weight_norm(nn.Linear(2, 2, bias=False))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return optimizer

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.schedule.step()
        self.average.rate += 0.01
        self.teacher_callback.rate += 0.01
        for buffer in (self.bank, self.saved):
            buffer.add_(1)
        with torch.no_grad():
            next(self.normed.parameters()).add_(1)
            self.normed(self.saved)
        self.outputs.append(self.saved.clone())


class Saving(Changing):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rate"] = self.average.rate


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, of which it saves nothing, as the SAM of many projects."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.1})
        self.inner, self.radius = torch.optim.SGD(self.param_groups, 0.1, momentum=0.9), 0.05

    def step(self, closure: Any = None) -> Any:
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["old"] = weight.detach().clone()
        return self.inner.step(closure)


class Wrapped(Vectors):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Wrapper(self.parameters())


class AddsUp(Vectors):
    """Steps at every third batch of an epoch of four."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 3 == 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class Collects(Vectors):
    """Empties a list after each epoch and begins another one with each, and keeps a third for the whole run."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs, self.begun, self.norms = list[Tensor](), list[Tensor](), list[float]()

    def on_train_epoch_start(self) -> None:
        self.begun = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs["loss"])
        self.begun.append(outputs["loss"])
        self.norms.append(outputs["loss"].item())

    def on_train_epoch_end(self) -> None:
        self.outputs.clear()


class Averages(L.Callback):
    """Averages the weights, in a dictionary and in a copy of the network."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.shadow = {name: weight.detach() for name, weight in pl_module.named_parameters()}
        self.copy, self.module = deepcopy(pl_module), pl_module
        self.losses = list[Tensor]()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for name, weight in pl_module.named_parameters():
            self.shadow[name] = self.shadow[name].lerp(weight.detach(), 0.1)
        for ours, theirs in zip(self.copy.parameters(), pl_module.parameters(), strict=True):
            ours.data.lerp_(theirs.data, 0.1)
        self.losses.append(pl_module.trainer.callback_metrics["train_loss"])


class SavesAverages(Averages):
    def state_dict(self) -> dict[str, Any]:
        return self.shadow


CASES = [
    (Wrapped, "auto", SaveOnce(step=1), ["inner of optimizer 0"]),
    (Wrapped, "fsdp", SaveOnce(step=1), ["inner of optimizer 0"]),
    (AddsUp, "auto", SaveOnce(step=1), ["gradients, such as those that the module has added up since its last"]),
    (Collects, "auto", SavesAverages(), ["norms"]),
    (Vectors, "auto", Averages(), ["callback Averages.copy, callback Averages.shadow"]),
]


@pytest.mark.parametrize(("module", "strategy", "callback", "named"), CASES)
def test_named_in_three_epochs(
    module: type, strategy: str, callback: L.Callback, named: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = [f"+module._target_={module.__module__}.{module.__name__}", f"strategy={strategy}"]
    with caplog.at_level(logging.WARNING, "onecurve"):
        fit(compose(folder, *OWN, *options, "trainer.max_epochs=3"), callback)
    messages = [record.getMessage() for record in caplog.records if "no checkpoint holds" in record.getMessage()]
    assert [one.partition(", which")[0].partition(" optimizer step")[0] for one in messages] == [
        f"no checkpoint holds {name}" for name in named
    ]


@pytest.mark.parametrize(("module", "is_named"), [(Changing, True), (Saving, False)])
def test_named_once(module: type, is_named: bool, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "onecurve"):
        fit(compose(folder, *OWN, f"+module._target_={__name__}.{module.__name__}"))
    messages = [record.getMessage() for record in caplog.records if "no checkpoint holds" in record.getMessage()]
    named = [message.partition(", which")[0] for message in messages]
    assert named == ["no checkpoint holds average, bank, schedule, teacher_callback"] * is_named
