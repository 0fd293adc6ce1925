"""The LightningDataModule of all image datasets: their splits, and augmentation on the device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from onecurve import Batch, BatchLayout, UserError, compiled, should_compile
from src.data.augment.augmentation import Augmentation
from src.data.augment.pixels import normalize
from src.data.image_files import find_images
from src.data.images import ImageFolder, ImageSplit, TransformedSplit, as_is, join
from src.data.sources.source import ImageSource
from src.data.splits import divide, load_sets


class ImageDataModule(L.LightningDataModule):
    """Images of any source, with augmentation that depends only on seed, epoch, step and sample.

    A plain DataModule: the engine orders the samples, and gives each process its share
    (`onecurve/data/ordered_data.py`).

    Args:
        source: finds or creates the files of the dataset, and reads them.
        num_classes, image_shape, mean, std: properties of the dataset. The shape is (channels, height, width); mean
            and std are per channel, in [0, 1].
        augment: the augmentation of training images.
        root: folder of the source's files.
        batch_size: samples per optimizer step, over all processes and accumulated micro-batches.
        batch_size_per_device: samples per process and micro-batch, as an alternative to `batch_size`.
        val_fraction: fraction of each class of the training set for validation; None for the dataset's own validation
            images or, without these, a tenth.
        train_samples: train on this many images only, the same fraction of each class; None for all.
        predict_dir: folder of image files to classify in prediction.
        num_workers: processes that fetch batches; 0 is usually fastest for images in memory.
        device_resident: keep the images on the device and transfer only indices; `auto`: if its memory is large enough.
        seed: determines the validation split and the augmentation.

    Attributes:
        has_pairs: whether samples are mixed with a partner, which then is in the same micro-batch and process.
        splits: the splits `train`, `val` and `test`; empty before `setup`.
    """

    hardware_options = ("root", "predict_dir", "num_workers", "device_resident")  # they change no curve

    def __init__(
        self,
        source: ImageSource,
        num_classes: int,
        image_shape: list[int],
        mean: list[float],
        std: list[float],
        augment: Augmentation,
        root: str = "data",
        batch_size: int | None = 128,
        batch_size_per_device: int | None = None,
        val_fraction: float | None = None,
        train_samples: int | None = None,
        predict_dir: str | None = None,
        num_workers: int = 0,
        device_resident: str | bool = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not augment:
            raise UserError("data.augment=null: set data.augment.crop_padding=0 data.augment.flip=false for none")
        _check_sizes(batch_size, batch_size_per_device, train_samples=train_samples)
        _check_properties(image_shape, mean, std, augment.crop_padding, val_fraction)
        if num_workers < 0:
            raise UserError(f"data.num_workers={num_workers}: give a number of processes, or 0 for none")
        on_host = num_workers or augment.transforms
        if device_resident not in ("auto", False) and (device_resident is not True or on_host):
            raise UserError(
                f"data.device_resident={device_resident}: give auto, false, or true, which excludes data.num_workers "
                "and data.augment.transforms"
            )
        if predict_dir is not None and not find_images(Path(predict_dir)):  # now, because training may take hours
            raise UserError(f"predict={predict_dir}: there is no such folder, or no image in it")
        self.source, self.root, self.num_classes = source, Path(root), num_classes
        self.image_shape, self.mean, self.std = cast(tuple[int, int, int], tuple(image_shape)), mean, std
        self.batch_size, self.batch_size_per_device = batch_size, batch_size_per_device
        self.val_fraction, self.train_samples, self.predict_dir = val_fraction, train_samples, predict_dir
        # Workers and transforms are on the host, and so is the fetching of all splits, which share their images.
        self.device_resident = False if on_host else device_resident
        self.num_workers, self.seed = num_workers, seed
        self.augment, self.has_pairs = augment, bool(augment.mixers)
        self.splits: dict[str, ImageSplit] = {}
        self._saved_classes: list[str] = []

    def prepare_data(self) -> None:
        if not self.splits and not (self.trainer and self.trainer.predicting):  # images in memory need no files
            self.source.prepare(self.root)

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return
        if not self.splits:
            sets = load_sets(self.source, self.root, self.num_classes, self.image_shape)
            self.splits = divide(sets, self.val_fraction, self.train_samples, self.seed)
            for split in self.splits.values():
                split.device_resident = self.device_resident
        self.augment.samples = len(self.splits["train"].dataset.labels)

    def train_dataloader(self) -> DataLoader[Batch]:
        split, transforms = self.splits["train"], self.augment.transforms
        return self._loader(TransformedSplit(split, transforms) if transforms else split, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.splits["val"])

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.splits["test"])

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self._loader(ImageFolder(Path(str(self.predict_dir)), self.image_shape))

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Normalize the images on the device and, in training, augment them."""
        trainer: Any = self.trainer
        dtype = trainer.lightning_module.dtype
        if trainer.training:
            return self.augment_batch(batch, trainer.current_epoch, trainer.global_step, dtype)
        return batch._replace(image=normalize(batch.image, self.mean, self.std, dtype))

    def augment_batch(self, batch: Batch, epoch: int = 0, step: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
        """Augment and normalize a batch of the training loader as the given step does; `to_pixels` shows the images."""
        trainer: Any = self.trainer
        layout = trainer.datamodule.layout if trainer else BatchLayout(len(batch.image), has_pairs=self.has_pairs)
        keys, mirrored = self.augment.keys(self.seed, epoch, batch.sample_index)
        transform: Any = type(self.augment).transform
        if should_compile(self.augment.compile, batch.image):
            transform = compiled(transform)
        image = transform(self.augment, batch.image, keys, mirrored, self.mean, self.std, dtype)
        image, target = self.augment.mix(image, batch.target, layout, self.seed, step, self.num_classes)
        return batch._replace(image=image, target=target)

    def to_pixels(self, image: Tensor) -> Tensor:
        """Undo the normalization, and return (n, channels, height, width) images in [0, 1]."""
        mean, std = (torch.tensor(values, device=image.device)[:, None, None] for values in (self.mean, self.std))
        return (image * std + mean).clamp(0, 1)

    @property
    def classes(self) -> list[str]:
        """Names of the classes in the order of the labels; their numbers if the dataset has no names."""
        return list(self.source.classes) or self._saved_classes or [str(label) for label in range(self.num_classes)]

    @property
    def description(self) -> str:
        """Some words about the images."""
        return self.source.description

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the classes, by which a checkpoint predicts without the dataset."""
        return {"classes": self.classes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_classes = state_dict["classes"]

    def _loader(self, data: ImageSplit | TransformedSplit | ImageFolder, shuffle: bool = False) -> DataLoader[Batch]:
        return DataLoader(
            data,
            self.batch_size or self.batch_size_per_device,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=join if isinstance(data, TransformedSplit) else as_is,
        )


def _check_sizes(batch_size: int | None, batch_size_per_device: int | None, **sizes: int | None) -> None:
    """Check numbers of samples, as configured."""
    if (batch_size is None) == (batch_size_per_device is None):
        raise UserError("give data.batch_size or data.batch_size_per_device, and set the other to null")
    sizes |= {"batch_size": batch_size, "batch_size_per_device": batch_size_per_device}
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            raise UserError(f"data.{name}={size}: give an integer of at least one")


def _check_properties(
    image_shape: Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
    crop_padding: int,
    val_fraction: float | None,
) -> None:
    """Check the properties of a dataset and of its splits, as configured, before the images are read."""
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise UserError(f"data.image_shape={list(image_shape)}: give [channels, height, width]")
    for name, values in {"mean": mean, "std": std}.items():
        if len(values) != image_shape[0]:
            raise UserError(f"data.{name}={values}: give one value for each of the {image_shape[0]} channels")
    if crop_padding >= min(image_shape[1:]):
        raise UserError(f"data.augment.crop_padding={crop_padding} must be smaller than the image, which it reflects")
    if val_fraction is not None and not 0 <= val_fraction < 1:
        raise UserError(f"data.val_fraction={val_fraction}: give a fraction of at least 0 and less than 1, or null")
