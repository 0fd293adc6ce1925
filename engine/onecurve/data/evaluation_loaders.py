"""The loaders of an evaluation: each sample is evaluated once, by one of the ranks."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from onecurve.data.batch_samplers import EvaluationBatches, apply_limit, limit_without_length
from onecurve.data.layout import DataParallelInfo, Division
from onecurve.data.loader import Loaders, RankLoader, has_given_batches, order_of, yields_batches
from onecurve.data.samples import makes_batches
from onecurve.data.streams import StreamLoader, length_of_stream
from onecurve.errors import UserError
from onecurve.random.seeding import EVALUATION


class EvaluationLoaders:
    """The loaders of `val`, `test` or `predict`, which are evaluated one after the other.

    Args:
        name: one of these three.
        division: the division of training batches, whose ranks share the samples.
        limit: the limit of global batches; None for all.
    """

    def __init__(self, name: str, loaders: Loaders, division: Division, seed: int, limit: int | float | None) -> None:
        self.name, self.leaves, self.division, self.seed, self.limit = name, loaders.leaves, division, seed, limit
        self._option = f"trainer.limit_{name}_batches"
        parallel = division.parallel
        self.parallel, self.ranks = parallel, [parallel.dp_rank]
        if name == "predict":  # all ranks gather as many predictions
            self.parallel = DataParallelInfo(parallel.dp_size, parallel.dp_rank)
        elif division.bit_exact:
            self.parallel, self.ranks = DataParallelInfo(division.virtual_ranks), list(division.own_virtual_ranks)

    @property
    def has_samples(self) -> bool:
        """Whether there are samples to evaluate."""
        return self.limit != 0 and any(map(self._has_samples, self.leaves))

    def of_rank(self, device: torch.device) -> Any:
        """Return the loader of this rank, or a list of several."""
        loaders: list[Any] = []
        for loader in self.leaves if self.limit != 0 else ():
            if isinstance(loader.dataset, IterableDataset):
                loaders.append(self._stream(loader))
            elif self._has_samples(loader):
                batches = self._batches(loader)
                loaders.append(RankLoader(loader, batches, self.seed, device, self.division.is_divided))
        return loaders[0] if len(loaders) == 1 else loaders

    def check(self, takes_batch: bool) -> None:
        """Check that each rank has a sample in each batch, unless padding has a weight of zero; and can be gathered."""
        for loader in filter(self._has_samples, self.leaves):
            may_pad = makes_batches(loader.dataset) and (takes_batch or self.name == "predict")
            if not may_pad and not isinstance(loader.dataset, IterableDataset):
                parts = self.division.accumulate if loader.batch_size else None
                self._batches(loader).check_no_rank_is_empty(self.name, parts)

    def _has_samples(self, loader: DataLoader[Any]) -> bool:
        if has_given_batches(loader):
            return len(order_of(loader, self.seed, EVALUATION)) > 0
        return isinstance(loader.dataset, IterableDataset) or len(cast(Any, loader.sampler)) > 0

    def _batches(self, loader: DataLoader[Any]) -> EvaluationBatches:
        order, unit = order_of(loader, self.seed, EVALUATION), self._unit(loader)
        if not isinstance(order, Tensor):
            order, unit = torch.cat(order), max(map(len, order))
        count = apply_limit(self._option, self.limit, len(order), unit)
        # A batch that the dataset has made cannot be joined with another one.
        size = unit if yields_batches(loader) else unit // self.division.accumulate
        return EvaluationBatches(order[:count], size, self.parallel, self.ranks)

    def _stream(self, loader: DataLoader[Any]) -> StreamLoader:
        samples, unit = length_of_stream(loader.dataset), self._unit(loader)
        if samples is None:
            steps = limit_without_length(self._option, self.limit)
        else:
            steps = apply_limit(self._option, self.limit, -(-samples // unit))
        return StreamLoader(loader, unit, self._divide, steps, self.seed, self.division.is_divided, evaluates=True)

    def _divide(self, count: int) -> Sequence[Tensor]:
        """Return the positions of this rank in so many samples of a stream."""
        if count < self.parallel.dp_size:
            raise UserError(
                f"a batch of {count} samples of the stream of `{self.name}` leaves a process or virtual rank without "
                f"one: set the loader's batch_size, trainer.limit_{self.name}_batches, or fewer trainer.devices"
            )
        return [torch.arange(rank, count, self.parallel.dp_size) for rank in self.ranks]

    def _unit(self, loader: DataLoader[Any]) -> int:
        """Return the samples of a global batch: as many as ranks, if the dataset makes the batch of each."""
        return self.parallel.dp_size if yields_batches(loader) else cast(int, loader.batch_size)
