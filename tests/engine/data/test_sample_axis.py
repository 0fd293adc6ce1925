"""How a loader's number of samples is found, whatever its `collate_fn` makes of them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from onecurve.data.orders import order_of
from onecurve.data.rank_loader import SampleAxis, sample_axis


class Texts(Dataset[Any]):
    """Texts of different lengths, of which the first ten have four tokens; it lists what is fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 60

    def __getitem__(self, position: int) -> Any:
        self.fetched.append(position)
        return torch.ones(4 if position < 10 else position // 4, dtype=torch.int64), position % 2


def concatenate(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of an `nn.EmbeddingBag`, and labels."""
    texts, labels = zip(*samples, strict=True)
    offsets = torch.tensor([0, *map(len, texts[:-1])]).cumsum(0)
    return torch.cat(texts), offsets, torch.tensor(labels)


def test_counts_the_offsets_and_not_the_tokens() -> None:
    dataset = Texts()
    loader = DataLoader(dataset, 8, collate_fn=concatenate)
    assert sample_axis(loader, order_of(loader, 0, 0), 0) == SampleAxis(1, 0, 1)
    assert max(dataset.fetched) == 59, "the pairs are spread over the dataset"


def test_fetches_what_the_sampler_gives() -> None:
    """Samples that a sampler leaves out may be broken, and those of a batch fit together."""
    own: dict[str, Any] = {"batch_sampler": [[20, 22, 24], [31], [40, 42]]}
    for options in ({"sampler": [*range(30, 50, 2)], "batch_size": 4}, own):
        dataset = Texts()
        loader: Any = DataLoader(dataset, collate_fn=concatenate, **options)
        sample_axis(loader, order_of(loader, 0, 0), 0)
        fetched = {position for position in dataset.fetched if position >= 8}
        assert fetched
        assert fetched <= set(range(20, 50, 2))
