"""A map-style dataset of anybody's, whose random transforms are the same on any hardware and after a restart."""

import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, get_worker_info

_log = logging.getLogger(__name__)


class SeededSamples(Dataset[Any]):
    """Fetches batches: the positions of n samples, (n,), and what `collate` makes of the samples.

    The global generators of torch, NumPy and Python are seeded with each sample's key before it is fetched, and with
    that of the first sample before they are collated. Workers have no state: the key comes with the position.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, samples: Tensor) -> tuple[Tensor, Any]:
        """Fetch the samples of (2, n) positions and keys; a dataset that has `batches` does so itself."""
        positions, keys = samples
        if hasattr(self.dataset, "batches"):
            return positions, next(iter(self.dataset.batches(positions[None])))
        with isolate_rng(include_cuda=False) if get_worker_info() is None else nullcontext():
            items = []
            for position, key in samples.T.tolist():
                seed_generators(key)
                items.append(self.dataset[position])
            seed_generators(int(keys[0]))
            return positions, self.collate(items)

    def __getattr__(self, name: str) -> Any:
        """Give a `worker_init_fn` the attributes of the dataset."""
        if name == "dataset":  # not yet unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def seed_generators(key: int, device_type: str = "cpu") -> None:
    """Seed the global generators of torch, NumPy and Python, with those of this process's devices of a type.

    torch.manual_seed would also seed, and so use, devices that the process does not use; and it would record a stack
    trace for each of their types, which takes half a millisecond.
    """
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)
    if device_type == "cuda":
        for generator in torch.cuda.default_generators:  # one process may drive several devices
            generator.manual_seed(key)
    elif device_type == "mps":
        torch.mps.manual_seed(key)


def warn_unless_repeatable(samples: SeededSamples, owner: str) -> None:
    """Warn of random numbers that the keys do not determine: of a generator that the dataset owns, or of a batch."""
    first, _, again = (samples.__getitems__(torch.tensor([[0, 0], [key, key]]))[1] for key in (1, 2, 1))
    if not _equal(first, again):
        _log.warning(
            "%s: a sample fetched twice differs, although torch, NumPy and Python are seeded alike. %s has a random "
            "generator or a state of its own, so the curve depends on the number of processes and on restarts: draw "
            "from the global generators instead",
            *(owner, type(samples.dataset).__name__),
        )
    with isolate_rng(include_cuda=False):
        items = [samples.dataset[0], samples.dataset[0]]
        before = _states()
        samples.collate(items)
        if _states() != before:
            _log.warning(
                "%s: collate_fn draws random numbers for the samples of one process, so the curve depends on the "
                "number of processes: draw them in the dataset, for each sample",
                owner,
            )


def _equal(a: Any, b: Any) -> bool:
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def _states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]
