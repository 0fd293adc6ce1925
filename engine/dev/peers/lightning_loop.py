"""A script of plain Lightning for `engine.dev.bench`: `Trainer(barebones=True)`, or what `Trainer()` does.

It has the data path, optimizer and schedule of `handwritten.py`; with `--samples` a DataLoader that fetches one sample
after the other from tensors in memory.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from engine.dev.peers.callbacks import Clock
from engine.dev.peers.common import (
    MEAN,
    STD,
    arguments,
    augmented,
    batches_of_epoch,
    build_optimizer,
    memory_format_of,
    set_up,
)
from onecurve import Trainer
from src.data.augment.pixels import normalize


class Batches:
    """The data path of the hand-written loop, without a DataLoader, which takes 14 us per batch."""

    def __init__(self, images: Tensor, labels: Tensor, batch: int, layout: torch.memory_format) -> None:
        self.images, self.labels, self.batch, self.layout = images, labels, batch, layout

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in batches_of_epoch(len(self.labels), self.batch, 0).to(self.labels.device):
            yield augmented(self.images, 0, index).contiguous(memory_format=self.layout), self.labels[index]


class Classifier(L.LightningModule):
    """A classifier as in the quick start of Lightning's documentation."""

    def __init__(self, net: torch.nn.Module, steps: int) -> None:
        super().__init__()
        self.net, self.steps = net, steps

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        image, label = batch
        loss = F.cross_entropy(self.net(image), label)
        if not self.trainer.barebones:
            self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer, schedule = build_optimizer(list(self.net.parameters()), self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--defaults", action="store_true", help="with progress bar, checkpoints and metrics.csv")
    parser.add_argument("--onecurve", action="store_true", help="by onecurve.Trainer, which has these by itself")
    parser.add_argument("--samples", action="store_true", help="from a DataLoader of a TensorDataset")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    images, labels, net = set_up(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    chosen: dict[str, Any] = {"barebones": True}
    if options.defaults or options.onecurve:
        folder = options.clock.parent
        chosen = {"default_root_dir": folder, "log_every_n_steps": options.log_every}
    if options.defaults:
        chosen["logger"] = CSVLogger(folder)
    library = Trainer if options.onecurve else L.Trainer
    trainer = library(devices=1, max_steps=options.steps, max_epochs=-1, **chosen)
    trainer.callbacks.append(Clock(str(options.clock), options.log_every))
    loader: Any = Batches(images, labels, options.batch, memory_format_of(options))
    if options.samples:
        samples = TensorDataset(normalize(images, MEAN, STD, torch.float32), labels)
        loader = DataLoader(samples, options.batch, shuffle=True, drop_last=True)
    trainer.fit(Classifier(net, options.steps), loader)


if __name__ == "__main__":
    main()
