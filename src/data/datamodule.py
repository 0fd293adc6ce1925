"""The LightningDataModule of all image datasets: their splits, and augmentation on the device."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from src.data.augment.augmentation import Augmentation, Preprocessing
from src.data.sources.source import ImageSource
from src.data.splits import check_properties, divide, load_sets
from src.engine import Batch, DataModule, ImageFiles, UserError


class ImageDataModule(DataModule):
    """Images of any source, with augmentation that depends only on seed, epoch, step and sample.

    Args:
        source: finds or creates the files of the dataset, and reads them.
        num_classes, image_shape, mean, std: properties of the dataset. The shape is (channels, height, width); mean
            and std are per channel, in [0, 1].
        augment: the augmentation of training images.
        root: folder of the source's files.
        val_fraction: fraction of each class of the training set for validation; None for the dataset's own validation
            images or, without these, a tenth.
        train_samples: train on this many images only, the same fraction of each class; None for all.
        predict_dir: folder of image files to classify in prediction.
        batch_size, batch_size_per_device, norm_groups, num_workers, device_resident, limits: as in `DataModule`.
        seed: determines the validation split, the order of the samples and their augmentation.
    """

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
        norm_groups: int = 4,
        val_fraction: float | None = None,
        train_samples: int | None = None,
        predict_dir: str | None = None,
        num_workers: int = 0,
        device_resident: str | bool = "auto",
        seed: int = 0,
        limits: dict[str, int | float] | None = None,
    ) -> None:
        if augment.transforms:
            # They run on the host, and so does the fetching of all splits, which share their images.
            if device_resident is True:
                raise UserError("data.device_resident=true, but data.augment.transforms run on the host: set auto")
            device_resident = False
        super().__init__(batch_size, batch_size_per_device, norm_groups, num_workers, device_resident, seed, limits)
        check_properties(image_shape, mean, std, augment.crop_padding, val_fraction, train_samples)
        self.source, self.root, self.num_classes = source, Path(root), num_classes
        self.image_shape, self.mean, self.std = cast(tuple[int, int, int], tuple(image_shape)), mean, std
        self.val_fraction, self.train_samples, self.predict_dir = val_fraction, train_samples, predict_dir
        self.augment, self.has_pairs = augment, bool(augment.mixers)
        self.preprocessing = Preprocessing(augment, mean, std, num_classes, seed)
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
        self.augment.samples = len(self.splits["train"].dataset.labels)
        self.check_batches(stage)

    def train_dataloader(self) -> DataLoader[Batch]:
        return self.training_loader(self.augment.transforms)

    def val_dataloader(self) -> DataLoader[Batch] | list[Any]:
        return self.evaluation_loader("val")

    def test_dataloader(self) -> DataLoader[Batch] | list[Any]:
        return self.evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self.prediction_loader(ImageFolder(Path(str(self.predict_dir)), self.image_shape))

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch | tuple[Tensor, Tensor]:
        """Normalize the images on the device and, in training, augment them."""
        trainer: Any = self.trainer
        dtype = trainer.lightning_module.dtype
        if trainer.training:
            batch = self.augment_batch(batch, trainer.current_epoch, trainer.global_step, dtype)
        else:
            batch = self.preprocessing.normalize(batch, dtype)
        return self.to_step_input(batch)

    def augment_batch(self, batch: Batch, epoch: int = 0, step: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
        """Augment and normalize a batch of the training loader as the given step does; `to_pixels` shows the images."""
        return self.preprocessing.augment(batch, self.layout, epoch, step, dtype)

    def to_pixels(self, image: Tensor) -> Tensor:
        """Undo the normalization, and return (n, channels, height, width) images in [0, 1]."""
        return self.preprocessing.to_pixels(image)

    @property
    def classes(self) -> list[str]:
        """Names of the classes in the order of the labels; their numbers if the dataset has no names."""
        return list(self.source.classes) or self._saved_classes or [str(label) for label in range(self.num_classes)]

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the classes, by which a checkpoint predicts without the dataset."""
        return {"classes": self.classes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_classes = state_dict["classes"]


class ImageFolder(Dataset[Batch]):
    """The images of a folder and its subfolders, for prediction; an item is a batch.

    Raises:
        UserError: if the folder contains no image, or an image cannot be read.
    """

    def __init__(self, folder: Path, image_shape: tuple[int, int, int]) -> None:
        self.images = ImageFiles.in_folder(folder, image_shape, f"predict={folder}")
        self.files = self.images.files

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, positions: Tensor) -> Batch:
        images = self.images[positions.clamp_min(0)]  # padding fetches image 0, with weight 0
        return Batch(images, torch.zeros_like(positions), positions, weight=positions >= 0)
