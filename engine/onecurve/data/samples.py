"""The samples of a batch: fetched with the generators seeded for each, collated, and counted in what that makes."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset, Subset, get_worker_info

from onecurve.errors import UserError
from onecurve.patches.torch import leaves_with_paths, tree_leaves
from onecurve.random.seeding import refuse_draws, seed_generators


class SampleAxis(NamedTuple):
    """Which size of a batch is its number of samples, or a multiple: dimension `dim` of the tensor number `leaf`."""

    leaf: int
    dim: int
    per_sample: int

    def samples_in(self, batch: Any) -> float:
        """Return the number of samples in a batch."""
        return tree_leaves(batch)[self.leaf].shape[self.dim] / self.per_sample


def find_sample_axis(pairs: Sequence[Any], singles: Sequence[Any]) -> SampleAxis | None:
    """Compare batches of two samples with batches of one: the size that doubles most often is the number of samples.

    Of several sizes it is one that is the number itself, as texts that are concatenated may have equal lengths. None if
    no size doubles more than once, by which a padded length might do so by chance.
    """
    doubled = Counter[SampleAxis]()
    for pair, single in zip(pairs, singles, strict=True):
        leaves = zip(leaves_with_paths(pair), leaves_with_paths(single), strict=False)
        for leaf, ((path, two), (other, one)) in enumerate(leaves):
            if path != other:  # a list of samples shifts the leaves behind it
                continue
            sizes = zip(getattr(two, "shape", ()), getattr(one, "shape", ()), strict=False)
            doubled.update(SampleAxis(leaf, dim, b) for dim, (a, b) in enumerate(sizes) if b and a == 2 * b)
    rated = doubled.items()
    axis, times = max(rated, key=lambda item: (item[1], item[0].per_sample == 1), default=(None, 0))
    return axis if times > 1 else None


@dataclass(eq=False)
class SeededSamples(Dataset[Any]):
    """Fetches batches: the positions of n samples, (n,), and what `collate` makes of the samples.

    The global generators of torch, NumPy and Python are seeded with each sample's key before it is fetched, and with
    that of the first sample before they are collated. Workers have no state: the key comes with the position.

    Args:
        dataset: the samples.
        collate: makes a batch of samples.
        is_divided: whether other ranks or micro-batches hold parts of the same global batch, so that `collate` must not
            draw random numbers nor change the number of samples.
        axis: what has the number of samples in a batch, if it is known.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    is_divided: bool = False
    axis: SampleAxis | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, samples: Tensor) -> tuple[Tensor, Any]:
        """Fetch the samples of (2, n) positions and keys; a dataset that has `batches` does so itself."""
        positions, keys = samples
        if makes_batches(self.dataset):
            return positions, next(iter(self.dataset.batches(positions[None])))
        with isolate_rng(include_cuda=False) if get_worker_info() is None else nullcontext():
            items = []
            for position, key in samples.T.tolist():
                seed_generators(key)
                items.append(self._fetch(position))
            seed_generators(int(keys[0]))
            with refuse_draws("collate_fn", self.is_divided):
                batch = self.collate(items)
            made = self.axis.samples_in(batch) if self.is_divided and self.axis else len(items)
            if made != len(items):
                raise UserError(
                    f"collate_fn makes a batch of {made:g} samples from {len(items)}, so the curve would depend on the "
                    "number of processes: leave samples out in the dataset, or set bit_exact=true"
                )
            return positions, batch

    def _fetch(self, position: int) -> Any:
        try:
            return self.dataset[position]
        except Exception as error:
            if not isinstance(error, UserError) and hasattr(error, "add_note"):  # Python 3.10 has no notes
                dataset = self.dataset
                while isinstance(dataset, Subset):
                    dataset, position = dataset.dataset, dataset.indices[position]
                error.add_note(f"This is sample {position} of {type(dataset).__name__}.")
            raise


def makes_batches(dataset: Any) -> bool:
    """Return whether a dataset makes batches of positions itself (`RankLoader`)."""
    return hasattr(dataset, "batches") and hasattr(dataset, "move_to")
