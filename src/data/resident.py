"""Images that stay on the device of the network, so that an epoch transfers only its sample indices."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from src.data.batch import Batch
from src.data.sampler import Batches
from src.data.splits import ImageSplit

# Takes the epoch and (batches, n) indices, and yields the cropped images of each batch.
Crops = Callable[[int, Tensor], Iterator[Tensor]]
# Under `auto`, the images may take this fraction of a GPU's free memory: with borders and mirrored copies, a tenth.
_SHARE = 0.04


def stays(split: ImageSplit, device: torch.device, choice: str | bool, num_workers: int) -> bool:
    """Return whether to keep the images of the split on the device.

    Under `auto` they stay if they are there already, or take a small part of a GPU's memory; with workers they do not.
    """
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
    """Return a DataLoader whose items are whole batches, from the device or from the host as `choice` says.

    On the device, `crops` fetches the images already cropped. On the host, it is not used.
    """
    if isinstance(data, ImageSplit) and stays(data, device, choice, num_workers):
        return ResidentBatches(data, batches, device, crops)
    pin = device.type == "cuda"
    return DataLoader(data, sampler=batches, batch_size=None, num_workers=num_workers, pin_memory=pin)


class ResidentBatches(DataLoader[Batch]):
    """A DataLoader that gathers batches from images on the device, without workers and per-batch overhead.

    All indices of an epoch are sent at once from pinned memory, without a host-device synchronization. `crops` takes
    the epoch and its (batches, n) indices, and yields cropped images instead of full ones.
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
