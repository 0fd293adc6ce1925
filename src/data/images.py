"""Datasets of images that are fetched in batches, from the memory of the device or of the host."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from onecurve import Batch, UserError
from src.data.image_files import ImageFiles, find_images
from src.data.sources.source import Images

Transform = Callable[[Tensor], Tensor]

_MAX_FRACTION = 0.1  # of a GPU's free memory, for the images under `auto`


class ImageSet:
    """All (n, channels, height, width) uint8 images of a dataset and their (n,) labels, which its splits share."""

    def __init__(self, images: Images, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def move(self, device: torch.device) -> None:
        """Move the images, a tensor, and the labels to the device, where they stay."""
        assert isinstance(self.images, Tensor)
        self.images, self.labels = self.images.to(device), self.labels.to(device)

    def gather(self, index: Tensor) -> Tensor:
        """Return the images of (n,) indices, which are on the device of a tensor of images."""
        if isinstance(self.images, Tensor):
            return self.images.index_select(0, index)  # `images[index]` would be much slower
        return self.images[index]


class ImageSplit(Dataset[Batch]):
    """A split of a dataset, fetched in batches by positions in the split, of which -1 is padding.

    Args:
        dataset: the images of all splits.
        indices: (n,) indices of this split's images.
        device_resident: keep the images on the device; `auto`: if its memory is large enough.
    """

    def __init__(self, dataset: ImageSet, indices: Tensor, device_resident: str | bool = "auto") -> None:
        self.dataset, self.indices, self.device_resident = dataset, indices, device_resident

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self.dataset.labels.device

    def move_to(self, device: torch.device) -> bool:
        """Move the images, with those of other splits of the dataset, if they should stay on the device.

        Returns:
            Whether the batches are on the device.
        """
        if should_keep_on_device(self.dataset.images, device, self.device_resident):
            self.dataset.move(device)
        self.indices = self.indices.to(self.device)
        return self.device == device

    def batches(self, positions: Tensor) -> Iterator[Batch]:
        """Yield the batch of each row of (batches, n) positions; padding has the image at position 0, and weight 0."""
        positions = positions.to(self.indices.device)
        index, is_sample = self.indices[positions.clamp_min(0)], positions >= 0
        rows = zip(index, self.dataset.labels[index], index.where(is_sample, -1), is_sample, strict=True)
        for index_row, labels, sample_index, weight in rows:
            yield Batch(self.dataset.gather(index_row), labels, sample_index, weight)

    def fetch(self, positions: Tensor) -> Batch:
        """Return the batch of (n,) positions."""
        return next(self.batches(positions[None]))

    def __getitems__(self, positions: list[int]) -> Batch:
        """Let a plain DataLoader fetch a batch."""
        return self.fetch(torch.tensor(positions))


class TransformedSplit(Dataset[Batch]):
    """A split for training whose images go through the user's transforms when they are fetched; an item is a sample.

    Args:
        split: the training samples.
        transforms: map a (channels, height, width) uint8 image to another of the same shape, in this order. They draw
            from the global generators of torch, NumPy and Python, which a run seeds for each sample.
    """

    def __init__(self, split: ImageSplit, transforms: Sequence[Transform]) -> None:
        self.split, self.transforms = split, transforms
        self.dataset, self.indices = split.dataset, split.indices

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, position: int) -> Batch:
        """Return a batch of one sample."""
        batch = self.split.fetch(torch.tensor([position]))
        image = batch.image[0]
        for transform in self.transforms:
            image = transform(image)
            if image.dtype != torch.uint8 or image.shape != batch.image.shape[1:]:
                raise UserError(
                    f"data.augment.transforms: {transform} returns {image.dtype} {tuple(image.shape)}, "
                    f"but must return torch.uint8 {tuple(batch.image.shape[1:])}"
                )
        return batch._replace(image=image[None])


class ImageFolder(Dataset[Batch]):
    """The images of a folder and its subfolders, for prediction."""

    def __init__(self, folder: Path, image_shape: tuple[int, int, int]) -> None:
        self.files = find_images(folder)
        self.images = ImageFiles(self.files, image_shape, f"predict={folder}")

    def __len__(self) -> int:
        return len(self.images)

    def move_to(self, device: torch.device) -> bool:
        """Return whether the batches are on the device."""
        return device.type == "cpu"

    def batches(self, positions: Tensor) -> Iterator[Batch]:
        """Yield the batch of each row of (batches, n) positions; padding has image 0, and weight 0."""
        for row in positions:
            yield Batch(self.images[row.clamp_min(0)], torch.zeros_like(row), row, weight=row >= 0)


def join(batches: list[Batch]) -> Batch:
    """Return one batch of several."""
    return Batch(*map(torch.cat, zip(*batches, strict=True)))


def as_is(batch: Any) -> Any:
    """Collate nothing: the dataset has fetched a batch."""
    return batch


def should_keep_on_device(images: Images, device: torch.device, choice: str | bool) -> bool:
    """Return whether to keep images on the device.

    Under `auto` they stay there if they are there already, or need a small fraction of a GPU's free memory.
    """
    if not isinstance(images, Tensor):
        if choice is True:
            raise UserError(
                "data.device_resident=true, but the images are not in memory: set data.device_resident=auto"
            )
        return False
    if choice != "auto":
        return choice is True
    if images.device == device:
        return True
    return device.type == "cuda" and images.nbytes <= _MAX_FRACTION * torch.cuda.mem_get_info(device)[0]
