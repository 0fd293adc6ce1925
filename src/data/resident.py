"""Images that lie where the network is: no batch travels, and of an epoch only its indices do."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from src.data.batch import Batch
from src.data.sampler import Batches
from src.data.splits import ImageSplit

Crops = Callable[[int, Tensor], Iterator[Tensor]]
_SHARE = 0.04  # of a GPU's free memory that images may take without being told to: with borders, a tenth


def stays(split: ImageSplit, device: torch.device, choice: str | bool, num_workers: int) -> bool:
    """Whether the split's images are to be kept on the device: under `auto` if they are there, or fit well."""
    if choice != "auto" or num_workers:
        return choice is True
    if split.dataset.images.device == device:
        return True
    return device.type == "cuda" and split.dataset.images.nbytes <= _SHARE * torch.cuda.mem_get_info(device)[0]


def loader(
    data: Dataset[Batch],
    batches: Batches,
    device: torch.device,
    choice: str | bool,
    num_workers: int,
    crops: Crops | None = None,
) -> DataLoader[Batch]:
    """Of whole batches, from the device if that is chosen, there cropped by `crops`; otherwise from the host."""
    if isinstance(data, ImageSplit) and stays(data, device, choice, num_workers):
        return ResidentBatches(data, batches, device, crops)
    pin = device.type == "cuda"
    return DataLoader(data, sampler=batches, batch_size=None, num_workers=num_workers, pin_memory=pin)


class ResidentBatches(DataLoader[Batch]):
    """A DataLoader without workers, and without what it does for each batch.

    All indices of an epoch are sent at once, from pinned memory: the host waits for nothing. `crops` is told the epoch
    and its (batches, n) indices, and fetches images cropped instead of whole.
    """

    def __init__(
        self,
        split: ImageSplit,
        sampler: Batches,
        device: torch.device,
        crops: Crops | None = None,
    ) -> None:
        super().__init__(split, sampler=sampler, batch_size=None)
        split.dataset.move(device)
        self.split, self.batches, self.device, self.crops = split, sampler, device, crops

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        index = self.split.samples(self.batches.table())
        if self.device.type == "cuda":
            index = index.pin_memory().to(self.device, non_blocking=True)
        held, rows = self.split.dataset, index.clamp_min(0)
        images = self.crops(self.batches.epoch, rows) if self.crops else map(held.gather, rows)
        yield from map(Batch, images, held.labels[rows], index, index >= 0)
