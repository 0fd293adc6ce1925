"""LightningModules and DataModules with habits that a division of a batch by samples would break."""

import copy
import random
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy


class VectorData(L.LightningDataModule):
    """Vectors of 16 numbers in three classes."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def _samples(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(3, (count,), generator=generator)
        return TensorDataset(torch.randn(count, 16, generator=generator) + labels[:, None], labels)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._samples(150, 0), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._samples(37, 1), self.batch_size)


class Vectors(L.LightningModule):
    """A perceptron with dropout and a loss; `kind` is a method below."""

    def __init__(self, kind: str = "mean") -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = getattr(self, self.kind)(*batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def mean(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def class_weights(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        """A mean that is weighted by the classes that a batch happens to have."""
        return F.cross_entropy(self.net(x), y, weight=x.new_tensor([1.0, 2.0, 4.0]))

    def triplets(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        """Batch-hard triplets, which compare each sample with the others of its batch."""
        points, same = F.normalize(self.net(x), dim=1), y[:, None] == y[None]
        distance = torch.cdist(points, points)
        return F.relu((distance * same).amax(1) - (distance + 9 * same).amin(1) + 0.5).mean()

    def numpy_mixup(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        fraction, other = np.random.beta(1.0, 1.0), torch.from_numpy(np.random.permutation(len(x)))
        logits = self.net(fraction * x + (1 - fraction) * x[other])
        return fraction * F.cross_entropy(logits, y) + (1 - fraction) * F.cross_entropy(logits, y[other])

    def distillation(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        """A teacher that is a moving average, in a warm-up that counts batches."""
        with torch.no_grad():
            target = self.teacher(x)
        return F.mse_loss(self.net(x), target) * min(1.0, (batch_idx + 1) / self.trainer.num_training_batches)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for student, teacher in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                teacher.lerp_(student, 0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), 0.01)


class Meter:
    """A sum and a count, one of them in a slot."""

    __slots__ = ("__dict__", "count")

    def __init__(self) -> None:
        self.sum, self.count, self.history = 0.0, 0, list[float]()

    def update(self, value: float) -> None:
        self.sum, self.count = self.sum + value, self.count + 1
        self.history.append(value)


class Counting(Vectors):
    """What counts batches: logs of every kind and in every hook, metrics, and numbers of the module itself."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__()
        self.optimizer, self.seen, self.zeroed, self.running = optimizer, 0, 0, 0.0
        self.accuracy, self.mean_loss = MulticlassAccuracy(3, average="micro"), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        outputs = self.net(x * float(np.random.uniform(0.5, 1.5)))  # one number for the samples of a step
        loss = F.cross_entropy(outputs, y)
        self.accuracy(outputs, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("sized", loss, batch_size=len(x))
        self.log("samples", float(len(x)), reduce_fx="sum")
        self.log("max", outputs.max(), reduce_fx="max")
        self.log("min", outputs.min(), reduce_fx="min")
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("batch_idx", float(batch_idx))
        self.log("batches", float(self.trainer.num_training_batches + self.trainer.estimated_stepping_batches))
        return {"loss": loss, "outputs": outputs.detach()}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += len(batch[0])
        self.log("seen", float(self.seen))

    def on_after_backward(self) -> None:
        self.log("gradient", self._gradient_norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("same_gradient", self._gradient_norm())

    def _gradient_norm(self) -> Tensor:
        return torch.stack([weight.grad.norm() for weight in self.net.parameters() if weight.grad is not None]).norm()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.zeroed += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.running = 0.9 * self.running + 0.1 * outputs["loss"].item()
        self.mean_loss.update(F.cross_entropy(outputs["outputs"], batch[1]))
        self.log("mean_loss", self.mean_loss, on_step=True, on_epoch=False)
        self.log_dict({"running": self.running, "zeroed": float(self.zeroed), "rows": float(len(batch[1]))})
        self.log("global_step", float(self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=4)
        optimizer = torch.optim.Adam(self.net.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2}}


class NoisyVectorData(VectorData):
    """Draws on the device, as a library of augmentations does."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 0.1 * torch.rand_like(batch[0]), batch[1]


class CollectionOfCallback(L.Callback):
    """Has metrics of its own."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.metrics = MetricCollection([MeanMetric()])

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.metrics.update(batch[0].mean())

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log_dict(self.metrics.compute(), sync_dist=True)
        self.metrics.reset()


class Unusual(Vectors):
    """What few modules do: a complex buffer, gradients that nobody resets, a metric that is computed in each step."""

    waves: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.polar(torch.ones(16), torch.arange(16.0)))
        self.unoptimized, self.drop, self.losses = nn.Parameter(torch.ones(16)), nn.Dropout(0.5), MeanMetric()

    def mean(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(x * self.waves.real * self.unoptimized), y)
        self.losses.update(loss)
        values: dict[str, Any] = {"running": self.losses.compute(), "first": 1.0, "second": 2.0}
        for name in sorted(values, reverse=random.random() < 0.5):
            self.log(name, values[name])
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("summed_gradient", self.unoptimized.grad.norm())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("dropped", self.drop(batch[0]).sum())

    def on_train_epoch_end(self) -> None:
        self.log("epoch_loss", self.losses.compute())
        self.losses.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_batch_idx", float(batch_idx), sync_dist=True)

    def configure_callbacks(self) -> list[L.Callback]:
        return [CollectionOfCallback()]


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of 4 to 19 tokens, which are reversed at random."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, 20, (), generator=generator))
        tokens = torch.randint(1, 30, (length,), generator=generator)
        tokens = tokens.flip(0) if random.random() < 0.3 else tokens
        return tokens, tokens * 7 % 11


def pad_and_mask(lines: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pad to the longest line, and mask tokens at random."""
    tokens = nn.utils.rnn.pad_sequence([x for x, _ in lines], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([y for _, y in lines], batch_first=True, padding_value=-1)
    return tokens.masked_fill(torch.rand(tokens.shape) < 0.1, 0), labels


class LineData(L.LightningDataModule):
    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Lines(150), self.batch_size, shuffle=True, collate_fn=pad_and_mask)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Lines(37), self.batch_size, collate_fn=pad_and_mask)


class Tagger(nn.Module):
    """Draws from torch's generator in several ways, has a buffer of its own kind, and a layer for some batches only."""

    scale: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(30, 24), nn.BatchNorm1d(32), nn.Linear(32, 11)
        self.lstm = nn.LSTM(24, 32, num_layers=2, dropout=0.3, batch_first=True)
        self.sometimes, self.never = nn.Linear(32, 32), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(32))
        self.register_buffer("mask", torch.tensor([torch.finfo(torch.float32).min, 1 / 3]))

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(tokens))
        if self.training:
            states = states + 0.1 * torch.rand(states.shape)
            self.scale.mul_(0.9).add_(0.1 * states.detach().abs().amax((0, 1)))
        if tokens.shape[1] > 18:
            states = states + self.sometimes(states)
        states = self.norm((states / self.scale.clone()).flatten(0, 1)).view_as(states)
        return F.dropout(F.rrelu(states, training=self.training), 0.1, self.training)


class Tagging(L.LightningModule):
    """A masked loss, and a contrastive one between two passes of the same samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Tagger()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels = batch
        one, other = self.net(tokens), self.net(tokens)
        loss = F.cross_entropy(self.net.head(one).flatten(0, 1), labels.flatten(), ignore_index=-1)
        points, others = (F.normalize(states.mean(1), dim=1) for states in (one, other))
        contrast = F.cross_entropy(points @ others.T / 0.1, torch.arange(len(tokens)))
        self.log_dict({"contrast": contrast, "length": float(tokens.shape[1])})
        return loss + 0.1 * contrast

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, labels = batch
        outputs = self.net.head(self.net(tokens)).flatten(0, 1)
        loss = F.cross_entropy(outputs, labels.flatten(), ignore_index=-1)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(tokens))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)
