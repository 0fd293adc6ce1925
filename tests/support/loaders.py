"""DataModules whose loaders are of each kind that torch and Lightning know, and a module that takes their batches."""

import os
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, x[:, :1].sin())


class Stream(IterableDataset[Any]):
    """Points with noise, in an order that is drawn anew in each epoch. It divides itself among the ranks it sees.

    Args:
        count: the number of points.
    """

    def __init__(self, count: int) -> None:
        self.points = points(count, 0)

    def __iter__(self) -> Iterator[Any]:
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
        order = random.sample(range(len(self.points)), len(self.points))
        for index in order[: len(order) // world]:
            x, y = self.points[index]
            yield x + 0.1 * torch.randn(6), y


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.points)


class EarlyStream(SizedStream):
    """Ends before the length that it tells."""

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), 40)


class StatefulStream(IterableDataset[Any]):
    """Counts its points, and goes on from a state; `reads` counts what was read, also in workers."""

    reads = torch.zeros(1).share_memory_()

    def __init__(self, count: int) -> None:
        self.points, self.next = points(count, 0), 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < len(self.points):
            self.next += 1
            self.reads += 1
            yield self.points[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class ForgetfulStream(StatefulStream):
    """Reads two points ahead, which its state does not know, as a buffer of shuffled samples would."""

    def __iter__(self) -> Iterator[Any]:
        ahead: list[Any] = []
        for point in super().__iter__():
            ahead.append(point)
            if len(ahead) > 2:
                yield ahead.pop(0)
        yield from ahead


class OwnRandomStream(Stream):
    """Draws from a generator that nobody seeds."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.own = random.Random()

    def __iter__(self) -> Iterator[Any]:
        order = self.own.sample(range(len(self.points)), len(self.points))
        return (self.points[index] for index in order)


class ClockStream(Stream):
    """Draws from a generator that is new, and seeded by nobody, whenever the stream is read."""

    def __iter__(self) -> Iterator[Any]:
        self.own = random.Random()
        return OwnRandomStream.__iter__(self)  # type: ignore[arg-type]


class Batches(IterableDataset[Any]):
    """Yields batches, of different sizes."""

    def __init__(self, count: int) -> None:
        self.batches = [points(3 + number % 3, number).tensors for number in range(count)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class BySize(Sampler[list[int]]):
    """Batches of 10 to 14 neighbours, in random order."""

    def __init__(self, count: int) -> None:
        ends = list(torch.arange(12).remainder(5).add(10).cumsum(0))
        self.batches = [list(range(int(end) - 10, int(end))) for end in ends if end <= count]
        self.batches = [batch + batch[: number % 5] for number, batch in enumerate(self.batches)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(self.batches, len(self.batches)))


def leave_out_broken(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample[0][0] < 0.94])


def pad(samples: list[Any]) -> Any:
    """Return sequences of 1 to 7 points, padded by nan to the longest of the batch, and targets."""
    sequences = [x.expand(1 + int(50 * y.abs()) % 7, -1) for x, y in samples]
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=torch.nan), default_collate(
        [y for _, y in samples]
    )


def attend(sequences: Tensor, dropout: float) -> Tensor:
    """Return the mean of the points of each sequence, which have attended to each other."""
    is_point = ~sequences[..., :1].isnan()
    x = sequences.nan_to_num()
    x = F.scaled_dot_product_attention(x, x, x, attn_mask=is_point.transpose(1, 2), dropout_p=dropout)
    return (x * is_point).sum(1) / is_point.sum(1)


def take_twice(samples: list[Any]) -> Any:
    return default_collate([(sign * x, y) for x, y in samples for sign in (1, -1)])


class AnyLoader(L.LightningDataModule):
    """Loaders of one kind.

    Args:
        kind: a method below.
        num_workers: of the training loaders.
    """

    def __init__(self, kind: str, num_workers: int = 0, batch_size: int = 12) -> None:
        super().__init__()
        self.kind, self.num_workers, self.batch_size = kind, num_workers, batch_size

    def _loader(self, dataset: Dataset[Any], batch_size: int | None = None, **options: Any) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size or self.batch_size, num_workers=self.num_workers, **options)

    def train_dataloader(self) -> Any:
        return getattr(self, self.kind)()

    def broken(self) -> Any:
        """Loaders often leave out what they cannot read."""
        return self._loader(points(96, 0), collate_fn=leave_out_broken)

    def several_crops(self) -> Any:
        return self._loader(points(96, 0), collate_fn=take_twice)

    def padded(self) -> Any:
        return self._loader(points(96, 0), collate_fn=pad)

    def uneven(self) -> Any:
        return self._loader(points(70, 0), 10, shuffle=True)

    def stream(self) -> Any:
        return self._loader(Stream(70))

    def sized_stream(self) -> Any:
        return self._loader(SizedStream(70))

    def stateful_stream(self) -> Any:
        return self._loader(StatefulStream(70))

    def forgetful_stream(self) -> Any:
        return self._loader(ForgetfulStream(70))

    def early_stream(self) -> Any:
        return self._loader(EarlyStream(70))

    def one_after_the_other(self) -> Any:
        return CombinedLoader(self.two(), "sequential")

    def longest_stream(self) -> Any:
        return [self._loader(Stream(70)), self._loader(points(30, 0))]

    def own_random_stream(self) -> Any:
        return self._loader(OwnRandomStream(70))

    def clock_stream(self) -> Any:
        return self._loader(ClockStream(70))

    def stream_of_batches(self) -> Any:
        return DataLoader(Batches(30), batch_size=None, num_workers=self.num_workers)

    def batches(self) -> Any:
        return DataLoader(list(Batches(30)), batch_size=None, num_workers=self.num_workers)  # type: ignore[arg-type]

    def batch_sampler(self) -> Any:
        dataset = points(150, 0)
        return DataLoader(dataset, batch_sampler=BySize(len(dataset)), num_workers=self.num_workers)

    def two(self) -> Any:
        return {"some": self._loader(points(30, 0), shuffle=True), "others": [self._loader(points(80, 1), 24)]}

    def shortest(self) -> Any:
        return CombinedLoader(
            {"some": self._loader(Stream(40)), "others": [self._loader(points(99, 1), 24)]}, "min_size"
        )

    def longest(self) -> Any:
        return CombinedLoader(self.two(), "max_size")

    def val_dataloader(self) -> Any:
        if "stream" in self.kind:
            return DataLoader(Stream(41), 12)
        if self.kind == "batch_sampler":
            return DataLoader(points(41, 2), batch_sampler=[list(range(20)), list(range(20, 41))])
        return CombinedLoader([DataLoader(points(41, 2), 12)], "sequential") if self.kind == "two" else None

    def predict_dataloader(self) -> Any:
        return [DataLoader(points(41, 2), 12), DataLoader(points(10, 3), 5)]


class AnyModule(L.LightningModule):
    """Regression with dropout, of a batch or of all batches in a dictionary."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = attend(x, self.dropout if self.training else 0.0) if x.ndim == 3 else x
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            parts = [batch["some"], *batch["others"]]
            loss = torch.stack([self._loss(part) for part in parts if part is not None]).sum()
        else:
            loss = self._loss(batch)
        self.log("train/loss", loss, sync_dist=True)
        self.log("train/of_epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), batch_size=len(batch[0]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"y": self.net(batch[0]), "x": batch[0]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
