"""Plain Lightning for `scripts.dev.bench`: `--habits barebones`, or habits of tutorials whose cost is measured.

Barebones is `Trainer(barebones=True)` without logging, with the data path, optimizer and schedule of `handwritten.py`.
The habits are images one by one through PIL, torchmetrics with their defaults, and loss and accuracy of every step in
the progress bar, with a CSV file and a checkpoint per epoch. Each can be chosen alone.
"""

import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from scripts.dev.peers.callbacks import Clock
from scripts.dev.peers.common import arguments, augmented, batches_of_epoch, build_optimizer, memory_format_of, set_up
from scripts.dev.peers.data_path import pil_loader

HABITS = ("bar", "metrics", "images")


class Batches:
    """The data path of the hand-written loop, without a DataLoader, which takes 14 us per batch."""

    def __init__(self, images: Tensor, labels: Tensor, batch: int, layout: torch.memory_format) -> None:
        self.images, self.labels, self.batch, self.layout = images, labels, batch, layout

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in batches_of_epoch(len(self.labels), self.batch, 0).to(self.labels.device):
            yield augmented(self.images, 0, index).contiguous(memory_format=self.layout), self.labels[index]


class Classifier(L.LightningModule):
    """A classifier as in the quick start of Lightning's documentation."""

    def __init__(self, net: torch.nn.Module, habits: list[str], steps: int) -> None:
        super().__init__()
        self.net, self.habits, self.steps = net, habits, steps
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        image, label = batch
        logits = self.net(image)
        loss = F.cross_entropy(logits, label)
        if "metrics" in self.habits:
            self.accuracy(logits, label)
            self.log("train/acc", self.accuracy, on_step=True, on_epoch=True, prog_bar="bar" in self.habits)
        if "bar" in self.habits:
            self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer, schedule = build_optimizer(list(self.net.parameters()), self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--habits", default="barebones", help=f"barebones, or a comma-separated choice of {HABITS}")
    options = parser.parse_args()
    habits = [] if options.habits == "barebones" else options.habits.split(",")
    warnings.simplefilter("ignore")
    images, labels, net = set_up(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if "images" in habits:
        data: Any = pil_loader(options.data, options.batch)
    else:
        data = Batches(images, labels, options.batch, memory_format_of(options))
    folder = tempfile.mkdtemp()
    settings: dict[str, Any] = {"barebones": True}
    if habits:
        settings = {"logger": CSVLogger(folder), "default_root_dir": folder, "log_every_n_steps": options.log_every}
    trainer = L.Trainer(devices=1, max_steps=options.steps, max_epochs=-1, **settings)
    trainer.callbacks.append(Clock(str(options.clock), options.log_every))
    trainer.fit(Classifier(net, habits, options.steps), data)


if __name__ == "__main__":
    main()
