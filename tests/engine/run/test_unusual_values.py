"""What modules, callbacks and loggers of plain Lightning may hold and log, beside finite numbers of one element."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassConfusionMatrix

import onecurve
from onecurve.run.recorder import numbers_in
from tests.support.comparison import read_rows


class Noted(nn.Linear):
    """Saves a text beside its tensors."""

    note = ""

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


class Unusual(BoringModel):
    """Has a mask of attention, extra state, and a metric with several values, and logs in its own ways."""

    def __init__(self, width: float = float("nan")) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer: Any = Noted(32, 2)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.confusion = MulticlassConfusionMatrix(2)

    def setup(self, stage: str) -> None:
        logger: Any = self.logger
        logger.log_hyperparams(self.hparams)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.confusion(torch.zeros(len(batch), dtype=torch.int64), torch.ones(len(batch), dtype=torch.int64))
        self.log("confusion", self.confusion, logger=False)

    def on_validation_epoch_end(self) -> None:
        logger: Any = self.logger
        logger.log_metrics({"weight": self.layer.weight.detach()[0, 0]}, self.global_step)


class Reversed(L.Callback):
    """Keeps an array in reverse order."""

    found: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"array": np.arange(3.0)[::-1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = state_dict["array"].tolist()


def fit(folder: Path, module: L.LightningModule, epochs: int = 1, **options: Any) -> None:
    options |= {"devices": 1, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    trainer = onecurve.Trainer(default_root_dir=folder, max_epochs=epochs, log_every_n_steps=1, **options)
    loader = DataLoader(RandomDataset(32, 16), batch_size=8)
    trainer.fit(module, loader, loader, ckpt_path="last")


def test_unusual_values_are_saved_logged_and_restored(folder: Path) -> None:
    first = Unusual()
    first.layer.note = "kept"
    fit(folder, first, callbacks=[onecurve.EMA(), Reversed()])
    cells = [row["weight"] for row in read_rows(folder) if row["weight"]]
    assert len(cells) == 2  # of the sanity check, and of the epoch
    assert all(abs(float(cell)) < 1 for cell in cells)
    second, callback = Unusual(), Reversed()
    fit(folder, second, epochs=2, callbacks=[onecurve.EMA(), callback])
    assert second.layer.note == "kept"
    assert callback.found == [2, 1, 0]


class Adversarial(BoringModel):
    """Optimizes manually, and returns the losses of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self(batch).square().mean(1)
        if batch_idx:
            losses = losses * torch.tensor([1.0] * 7 + [float("nan")])
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(losses.mean())
        optimizer.step()
        return losses


def test_each_of_several_losses_is_finite(folder: Path) -> None:
    with pytest.raises(onecurve.DivergedUserError, match="the training loss is not finite at step 2"):
        fit(folder, Adversarial())


class Scheduled(BoringModel):
    """Warms up, and then decays, by a schedule of two."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        parts: list[Any] = [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 1)]
        parts.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1))
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [*parts, parts[1]], [2, 9])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_zero_follows_a_schedule_of_several(folder: Path) -> None:
    module = Scheduled()
    fit(folder, module, epochs=2, strategy=onecurve.DDP(shard_optimizer=True), limit_val_batches=0)
    assert module.rates == pytest.approx([0.05, 0.1, 0.1, 0.01])


class LeavesOut(BoringModel):
    """Saves no frozen weights, which it takes from another file."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: one for name, one in super().state_dict(*args, **kwargs).items() if "frozen" not in name}


def test_an_average_may_lack_weights_that_a_module_leaves_out(folder: Path) -> None:
    for epochs in (1, 2):
        fit(folder, LeavesOut(), epochs, callbacks=[onecurve.EMA()])
    assert torch.load(folder / "checkpoints" / "last.ckpt")["epoch"] == 1


def test_a_layer_without_a_shape_is_named(folder: Path) -> None:
    module = BoringModel()
    module.head = nn.LazyLinear(2)
    with pytest.raises(onecurve.UserError, match=r"head\.weight has no shape yet: call its layer with an example"):
        fit(folder, module)


class Normalized(BoringModel):
    """Has statistics that become NaN in a step that changes no weight, as with a gradient that a scaler skips."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def on_train_batch_end(self, *_: Any) -> None:
        self.norm(torch.full((2, 32), torch.inf))


def test_statistics_that_are_nan_are_not_saved(folder: Path) -> None:
    with pytest.raises(onecurve.DivergedUserError, match=r"norm\.running_var is NaN at step 2"):
        fit(folder, Normalized())


class Adds(L.Callback):
    """Adds another callback as a stage begins."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        trainer.callbacks.append(LambdaCallback(setup=lambda *_, stage: self.stages.append(stage)))


def test_a_callback_that_another_one_adds_is_set_up(folder: Path) -> None:
    adding = Adds()
    fit(folder, BoringModel(), callbacks=[adding])
    assert adding.stages == ["fit"]


def test_a_callback_may_set_a_metric_that_is_no_tensor() -> None:
    metrics = {"loss": torch.tensor(0.5), "score": 2, "confusion": torch.ones(2, 2)}
    assert numbers_in(metrics) == {"loss": 0.5, "score": 2}
