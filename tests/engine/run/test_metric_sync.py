"""Metrics and gathered rows of a pipeline count each evaluated sample once, although each stage holds it."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor
from torchmetrics import MetricTracker, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix

import onecurve
from onecurve.run.experiment import run_experiment
from tests.support.habits import VectorData, Vectors
from tests.support.pool import Pool
from tests.support.runs import compose

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false", "trainer.max_epochs=1"]
OWN += [f"+module._target_={__name__}.Confusion", f"+data._target_={__name__}.Data", "trainer.log_every_n_steps=1"]


class Data(VectorData):
    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self._samples(33, 1), self.batch_size)


class Confusion(Vectors):
    """Counts the samples by a matrix, by a metric that a hook makes, by copies of a metric, and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 3))
        self.matrix, self.trained = MulticlassConfusionMatrix(3), SumMetric()
        self.tracker = MetricTracker(SumMetric(), maximize=True)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained.update(len(batch[1]))
        return self.loss(self.net(batch[0]), batch)

    def on_train_batch_end(self, *_: Any) -> None:
        assert int(self.trained.compute()) == 32 * (self.global_step)

    def on_validation_epoch_start(self) -> None:
        self.matrix.reset()
        self.late, self.rows = SumMetric(), list[Tensor]()
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.net(batch[0])
        self.matrix.update(outputs, batch[1])
        self.late.update(len(batch[1]))
        self.tracker.update(len(batch[1]))
        self.rows.append(batch[0])
        self.log("count", float(len(batch[1])), reduce_fx="sum", sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        counts = [self.matrix.compute().sum(), self.late.compute(), self.tracker.compute()]
        rows = self.all_gather(torch.cat(self.rows))
        rows = rows.flatten(0, 1) if rows.ndim == 3 else rows
        counts += [len(rows), len(rows.unique(dim=0))]
        assert [int(count) for count in counts] == [33] * 5, counts

    def on_validation_end(self) -> None:
        assert int(self.trainer.callback_metrics["count"]) == 33


@pytest.mark.parametrize(
    "place",
    [
        ["strategy=pipeline", "trainer.devices=2"],
        ["strategy=pipeline", "strategy.stages=2", "trainer.devices=4"],
        ["strategy=ddp", "trainer.devices=2"],
    ],
    ids=["stages", "replicas", "ddp"],
)
def test_counts_each_sample_once(place: list[str], pool: Pool, folder: Path) -> None:
    cfg = compose(folder, *OWN, *place)
    pool.run(int(place[-1].rpartition("=")[2]), run_experiment, cfg)


class Counting(BoringModel):
    """Counts the samples of an epoch by a metric object."""

    def __init__(self) -> None:
        super().__init__()
        self.count = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count.update(len(batch))
        self.log("count", self.count, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Fails(L.Callback):
    def on_before_backward(self, *_: Any) -> None:
        raise ValueError("on purpose")


def count_after_an_error(folder: Path, devices: int) -> float:
    hardware: dict[str, Any] = {"strategy": "ddp", "devices": devices, "accelerator": "cpu", "max_epochs": 1}
    module, loader = Counting(), torch.utils.data.DataLoader(RandomDataset(32, 64), 16)
    quiet: Any = {"enable_progress_bar": False, "enable_model_summary": False}
    failing = onecurve.Trainer(default_root_dir=folder / "a", bit_exact=True, callbacks=[Fails()], **hardware, **quiet)
    with pytest.raises(ValueError, match="on purpose"):
        failing.fit(module, loader)
    module.count.reset()  # as with Lightning's trainer, it has the samples of the step that failed
    trainer = onecurve.Trainer(default_root_dir=folder / "b", **hardware, **quiet)
    trainer.fit(module, loader)
    return float(trainer.callback_metrics["count"])


def test_ranks_synchronize_metrics_after_a_fit_that_failed(pool: Pool, folder: Path) -> None:
    """Another trainer has replaced methods of the metrics, for its virtual ranks."""
    assert pool.run(2, count_after_an_error, folder, 2) == [64, 64]
