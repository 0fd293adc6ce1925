"""Images that stay on the device of the network, so that an epoch transfers only its sample indices."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from src.data.batch import Batch
from src.data.sampler import Batches
from src.data.splits import ImageSplit
from src.utils.errors import UserError

_MAX_FRACTION = 0.1  # of a GPU's free memory, for the images under `auto`


def should_keep_on_device(split: ImageSplit, device: torch.device, choice: str | bool, num_workers: int) -> bool:
    """Return whether to keep the images of the split on the device.

    Under `auto` they stay there if they are there already, or need a small fraction of a GPU's free memory. Workers
    cannot use images on a device.

    Raises:
        UserError: if the choice is true, but the images are not in memory.
    """
    images = split.dataset.images
    if not isinstance(images, Tensor):
        if choice is True:
            raise UserError(
                "data.device_resident=true, but the images are not in memory: set data.device_resident=auto"
            )
        return False
    if choice != "auto" or num_workers:
        return choice is True
    if images.device == device:
        return True
    return device.type == "cuda" and images.nbytes <= _MAX_FRACTION * torch.cuda.mem_get_info(device)[0]


class ResidentBatches(DataLoader[Batch]):
    """A DataLoader that gathers batches from images on the device, without workers and per-batch overhead.

    All indices of an epoch are sent at once from pinned memory, without a host-device synchronization.
    """

    def __init__(self, split: ImageSplit, sampler: Batches, device: torch.device) -> None:
        super().__init__(split, sampler=sampler, batch_size=None)
        split.dataset.move(device)
        self.split, self.batches, self.device = split, sampler, device

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        index = self.split.sample_indices(self.batches.table())
        if self.device.type == "cuda":
            index = index.pin_memory().to(self.device, non_blocking=True)
        dataset = self.split.dataset
        rows = index.clamp_min(0)  # padding fetches sample 0, with weight 0
        batches = zip(rows, dataset.labels[rows], index, index >= 0, strict=True)
        for batch_rows, target, sample_index, weight in batches:
            yield Batch(dataset.gather(batch_rows), target, sample_index, weight)
