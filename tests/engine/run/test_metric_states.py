"""Metrics with states of an unusual kind are the same on any number of ranks, and in a run that goes on elsewhere."""

import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricTracker, SumMetric
from torchmetrics.classification import MulticlassAUROC
from torchmetrics.wrappers import Running

import onecurve
from onecurve.errors import UserError
from tests.support.comparison import check_same_rows
from tests.support.pool import Pool


class Listed(Metric):
    """Keeps each sample in a list that nothing reduces, as `MeanAveragePrecision` keeps images."""

    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx=None)

    def update(self, rows: Tensor) -> None:
        self.rows.extend(rows.double())

    def __hash__(self) -> int:
        """Return that of the values, as `ROUGEScore`: two without values are equal."""
        return hash(len(self.rows))

    def compute(self) -> Tensor:
        return torch.stack(self.rows).sum(0)[0]


class Measured(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.val_listed, self.listed, self.window = Listed(), Listed(), Running(SumMetric(), window=4)
        self.shared = SumMetric()  # by training and validation

    def on_train_start(self) -> None:
        if self.current_epoch == 0:
            self.log("begins", 1.0, reduce_fx="sum")

    def on_train_epoch_start(self) -> None:
        norm = self.layer.weight.detach().norm()  # another one within the epoch
        self.log("starts", 1.0, reduce_fx="sum")
        self.log("first_norm", norm)
        self.log("mean_norm", norm, sync_dist=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self(batch))
        self.listed.update(batch)
        self.shared.update(batch[:, 0].double())
        self.log("shared", self.shared, on_step=False, on_epoch=True)
        self.window.update(batch[:, 0].double().sum())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("mean_step", float(self.trainer.global_step), on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log_dict({"listed": self.listed.compute(), "window": self.window.compute()}, sync_dist=True)
        self.listed.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_listed.update(batch)
        self.log("val_listed", self.val_listed)
        self.shared.update(batch[:, 0].double())
        self.log("val_shared", self.shared)


class Seen(L.Callback):
    """Adds up the samples of an epoch in a metric of its own; two of them stand side by side."""

    def __init__(self, name: str, scale: float) -> None:
        self.name, self.scale, self.sum = name, scale, SumMetric()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.sum.update(self.scale * batch[:, 0])

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log(self.name, self.sum.compute(), sync_dist=True)
        self.sum.reset()


class Interrupted(L.Callback):
    """Saves before a step, and ends the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.ckpt_path is None:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt")
            raise KeyboardInterrupt


def fit(folder: Path, devices: int, bit_exact: bool, *callbacks: L.Callback) -> None:
    samples = torch.randn(71, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options: dict[str, Any] = {"accelerator": "cpu", "strategy": "ddp", "devices": devices, "precision": "64-true"}
    options |= {"max_epochs": 2, "seed": 0, "bit_exact": bit_exact, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    options["callbacks"] = [*callbacks, Seen("seen", 1.0), Seen("seen_thrice", 3.0)]
    trainer = onecurve.Trainer(default_root_dir=folder, **options)
    train, val = (DataLoader[Any](part, batch_size=8, shuffle=len(part) == 50) for part in samples.split(50))
    trainer.fit(Measured(), train, val, ckpt_path="last")


def interrupt(folder: Path, devices: int, bit_exact: bool, step: int) -> None:
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(folder, devices, bit_exact, Interrupted(step))


@pytest.mark.parametrize("bit_exact", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_metric_has_all_samples(bit_exact: bool, pool: Pool, folder: Path) -> None:
    """Two ranks evaluate 11 and 10 samples; a run that goes on has the past on its first rank only."""
    fit(folder / "one", 1, bit_exact)
    pool.run(2, fit, folder / "two", 2, bit_exact)
    check_same_rows(folder / "one", folder / "two")
    for step in (5, 10):  # of six in an epoch
        interrupt(folder / f"{step}", 1, bit_exact, step)
        pool.run(2, fit, folder / f"{step}", 2, bit_exact)
        check_same_rows(folder / "one", folder / f"{step}")


class Tracking(L.Callback):
    """Counts the steps of each epoch."""

    def __init__(self) -> None:
        self.steps, self.of_epochs = MetricTracker(SumMetric(), maximize=True), list[float]()

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.steps.increment()

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.update(1.0)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        values: Any = self.steps.compute_all()
        self.of_epochs = values.tolist()


def test_a_tracker_of_a_callback_has_all_epochs(folder: Path) -> None:
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(folder, 1, False, Tracking(), Interrupted(10))
    tracking = Tracking()
    fit(folder, 1, False, tracking)
    assert tracking.of_epochs == [6.0, 6.0]


def test_metrics_of_copies_of_the_module_are_not_saved(folder: Path) -> None:
    """Nothing updates those of an averaged module, and a run without the callback would miss them."""
    fit(folder, 1, False, WeightAveraging())
    states = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)["metric_states"]
    assert "window" in states
    assert not [name for name in states if "WeightAveraging" in name]


class Copied(Measured):
    """Keeps its metrics in checkpoints, as modules with a loss that is a metric do, and a copy of one."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["metrics"] = {"listed": self.listed}

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.copy = self.shared.clone()
        self.copy.update(1.0)


def fit_copied(folder: Path, devices: int, bit_exact: bool) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "strategy": "ddp", "devices": devices, "bit_exact": bit_exact}
    options |= {"max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False}
    module, trainer = Copied(), onecurve.Trainer(default_root_dir=folder, **options)
    trainer.fit(module, DataLoader(RandomDataset(32, 32), batch_size=8))
    assert pickle.loads(pickle.dumps(module.copy)).compute() == module.copy.compute()


def test_metrics_can_be_copied_and_pickled(pool: Pool, folder: Path) -> None:
    pool.run(2, fit_copied, folder, 2, False)


def test_a_copy_of_a_metric_without_virtual_ranks_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="shared is copied, but copies lack virtual ranks"):
        fit_copied(folder, 1, True)


def test_a_validation_of_its_own_has_the_precision_of_the_run(folder: Path) -> None:
    """A sum of float32 is even above 2**24."""
    trainer = onecurve.Trainer(default_root_dir=folder, accelerator="cpu", devices=1, seed=0, precision="64-true")
    samples: Any = torch.full((3, 32), 2.0**24 + 1, dtype=torch.float64)
    (values,) = trainer.validate(Measured(), DataLoader(samples, batch_size=1), verbose=False)
    assert values["val_shared"] == 3 * (2.0**24 + 1)


class Curve(L.Callback):
    """Collects labels over an epoch."""

    def __init__(self) -> None:
        self.curve = MulticlassAUROC(2)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.curve.update(batch[:, :2].softmax(1), (batch[:, 2] > 0).long())

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.curve.compute()
        self.curve.reset()


def test_labels_that_a_metric_has_collected_stay_integers_in_a_validation(folder: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "precision": "64-true", "val_check_interval": 2}
    trainer = onecurve.Trainer(default_root_dir=folder, max_epochs=1, seed=0, callbacks=Curve(), **options)
    samples: Any = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    trainer.fit(Measured(), DataLoader(samples, batch_size=8), DataLoader(samples, batch_size=8))


class Counts(BoringModel, onecurve.Module):
    """Counts the batches of a validation, which fails in its second batch if it is to."""

    takes_batch = False

    def __init__(self) -> None:
        super().__init__()
        self.count, self.fails = SumMetric(), True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.fails and batch_idx == 1:
            raise OSError("a file is missing")
        self.count(1)
        self.log("val/count", self.count)


def test_a_fit_begins_without_the_samples_of_one_that_failed(tmp_path: Path) -> None:
    module = Counts()
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0}
    options |= {"limit_train_batches": 1, "limit_val_batches": 3}
    with pytest.raises(OSError, match="missing"):
        onecurve.Trainer(default_root_dir=tmp_path / "failed", **options).fit(module)
    module.fails = False
    trainer = onecurve.Trainer(default_root_dir=tmp_path / "again", **options)
    trainer.fit(module)
    assert trainer.callback_metrics["val/count"] == 3
