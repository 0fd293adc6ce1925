"""The LightningDataModule of all image datasets: splits, global batches, augmentation on the device."""

from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from src.data.augment.augmentation import Augmentation
from src.data.augment.pixels import normalize
from src.data.batch import Batch
from src.data.image_folder import ImageFolder
from src.data.limits import apply_limit, check_global_batch
from src.data.parallel import DataParallelInfo, data_parallel_info
from src.data.resident import build_loader
from src.data.sampler import Batches, EvaluationBatches, TrainingBatches
from src.data.sources.source import ImageSource
from src.data.splits import ImageSplit, load_images, stratified_split
from src.utils.errors import UserError


class ImageDataModule(L.LightningDataModule):
    """Images in memory, global batches, and augmentation that depends only on seed, epoch, step and sample.

    Args:
        source: finds or creates the files of the dataset, and reads them.
        num_classes, image_shape, mean, std: properties of the dataset. The shape is (channels, height, width); mean
            and std are per channel, in [0, 1].
        augment: the augmentation of training images.
        root: folder of the source's files.
        batch_size: samples per optimizer step, over all processes and accumulated micro-batches.
        batch_size_per_device: samples per process and micro-batch, as an alternative to `batch_size`.
        val_fraction: fraction of each class of the training set for validation.
        train_samples: train on this many images only, the same fraction of each class; null for all.
        predict_dir: folder of image files to classify in prediction.
        num_workers: processes that fetch batches; the data is in memory, so 0 is usually fastest.
        device_resident: keep the images on the device and transfer only indices; `auto`: if its memory is large enough.
        seed: determines the validation split, the order of the samples and their augmentation.
        limits: limits of `train`, `val` and `test` per epoch: a number of global batches, or a fraction.

    Raises:
        UserError: if both or no batch sizes are given, the batch does not divide among the processes, or a value is
            out of its range.
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
        val_fraction: float = 0.1,
        train_samples: int | None = None,
        predict_dir: str | None = None,
        num_workers: int = 0,
        device_resident: str | bool = "auto",
        seed: int = 0,
        limits: dict[str, int | float] | None = None,
    ) -> None:
        super().__init__()
        self.source, self.root, self.num_classes = source, Path(root), num_classes
        self.image_shape, self.mean, self.std = cast(tuple[int, int, int], tuple(image_shape)), mean, std
        self.batch_size, self.batch_size_per_device = batch_size, batch_size_per_device
        self.val_fraction, self.train_samples = val_fraction, train_samples
        self.augment, self.predict_dir = augment, predict_dir
        self.num_workers, self.device_resident, self.seed = num_workers, device_resident, seed
        self.limits = limits or {}
        self.resume_at = (0, 0)  # the epoch, and the number of its samples already trained
        self.splits: dict[str, ImageSplit] = {}
        self._check_options()

    def _check_options(self) -> None:
        if (self.batch_size is None) == (self.batch_size_per_device is None):
            raise UserError("give data.batch_size or data.batch_size_per_device, and set the other to null")
        for name in ("batch_size", "batch_size_per_device"):
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or size < 1):
                raise UserError(f"data.{name}={size}: give an integer of at least one")
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"data.val_fraction={self.val_fraction}: give a fraction of at least 0 and less than 1")
        if self.train_samples is not None and self.train_samples < 1:
            raise UserError(f"data.train_samples={self.train_samples}: give at least one, or null for all")
        padding = self.augment.crop_padding
        if padding >= min(self.image_shape[1:]):
            raise UserError(f"data.augment.crop_padding={padding} must be smaller than the image, which it reflects")
        choice = self.device_resident
        if choice not in ("auto", True, False) or (choice is True and self.num_workers):
            raise UserError(f"data.device_resident={choice}: give auto, false, or true with data.num_workers=0")

    def prepare_data(self) -> None:
        if not self.splits and not self.trainer.predicting:  # images in memory need no files
            self.source.prepare(self.root)

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return
        if not self.splits:
            self.splits = self._load_splits()
        check_global_batch(
            self.global_batch_size,
            self.parallel.dp_size,
            micro_batches=self.accumulate * self.parallel.num_microbatches,
            samples=len(self.splits["train"]),
            is_mixed=bool(self.augment.mixers),
        )
        if stage == "fit" and not self.steps_per_epoch:
            raise UserError("trainer.limit_train_batches=0 trains nothing: set fit=false instead")

    def _load_splits(self) -> dict[str, ImageSplit]:
        train, test = (load_images(self.source, self.root, name, self.num_classes) for name in ("train", "test"))
        train_index, val_index = stratified_split(train.labels, self.val_fraction, self.train_samples, self.seed)
        return {
            "train": ImageSplit(train, train_index),
            "val": ImageSplit(train, val_index),
            "test": ImageSplit(test, torch.arange(len(test.labels))),
        }

    def train_dataloader(self) -> DataLoader[Batch]:
        split = self.splits["train"]
        batches = TrainingBatches(
            len(split), self.global_batch_size, self.accumulate, self.seed, self.parallel, self.steps_per_epoch
        )
        batches.epoch, batches.start = self.resume_at
        return self._loader(split, batches)

    def val_dataloader(self) -> DataLoader[Batch] | list[Any]:
        count = self.evaluated_samples("val")
        return self._evaluation_loader(self.splits["val"], count) if count else []  # [] disables validation

    def test_dataloader(self) -> DataLoader[Batch] | list[Any]:
        count = self.evaluated_samples("test")
        return self._evaluation_loader(self.splits["test"], count) if count else []

    def predict_dataloader(self) -> DataLoader[Batch]:
        folder = ImageFolder(Path(str(self.predict_dir)), self.image_shape)
        return self._evaluation_loader(folder, len(folder))

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Transfer the batch, unless it is on the device already: Lightning's own check of this is slow."""
        if batch.image.device == device:
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Normalize the images on the device and, in training, augment them."""
        trainer, dtype = self.trainer, cast(torch.dtype, self.trainer.lightning_module.dtype)
        if not trainer.training:
            image = normalize(batch.image, self.mean, self.std, dtype)
            return batch._replace(image=image, weight=batch.weight.to(dtype))
        epoch, index = trainer.current_epoch, batch.sample_index
        pixels = self.augment.augment_pixels(batch.image, self.seed, epoch, index)
        image = normalize(pixels, self.mean, self.std, dtype)
        image = self.augment.apply_cutout(image, self.seed, epoch, index)
        image, target = self.augment.mix(image, batch.target, self.seed, trainer.global_step, self.num_classes)
        return Batch(image, target, index, batch.weight.to(dtype) / len(image))

    def to_pixels(self, image: Tensor) -> Tensor:
        """Undo the normalization, and return (n, channels, height, width) images in [0, 1]."""
        mean, std = (torch.tensor(values, device=image.device)[:, None, None] for values in (self.mean, self.std))
        return (image * std + mean).clamp(0, 1)

    @property
    def accumulate(self) -> int:
        """Number of accumulated micro-batches per optimizer step."""
        return self.trainer.accumulate_grad_batches

    @property
    def global_batch_size(self) -> int:
        """Number of samples per optimizer step, over all processes and micro-batches."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.batch_size_per_device is not None
        dp_size, _, num_microbatches = self.parallel
        return self.batch_size_per_device * self.accumulate * num_microbatches * dp_size

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps per epoch."""
        steps = len(self.splits["train"]) // self.global_batch_size
        return apply_limit("trainer.limit_train_batches", self.limits.get("train"), steps)

    @property
    def micro_batches_per_epoch(self) -> int:
        """Number of batches that each process trains on per epoch."""
        return self.steps_per_epoch * self.accumulate

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of the run: the horizon of learning-rate schedules."""
        epochs, steps = self.trainer.max_epochs, self.trainer.max_steps
        limits = [steps] if steps != -1 else []
        if epochs is not None and epochs != -1:
            limits.append(epochs * self.steps_per_epoch)
        return min(limits, default=1000 * self.steps_per_epoch)

    @property
    def parallel(self) -> DataParallelInfo:
        """The strategy's division of batches among ranks and micro-batches."""
        return data_parallel_info(cast(L.Trainer, self.trainer))

    @property
    def samples_per_micro_batch(self) -> int:
        """Number of samples that one process passes through the network at once."""
        dp_size, _, num_microbatches = self.parallel
        return self.global_batch_size // (dp_size * self.accumulate * num_microbatches)

    def evaluated_samples(self, name: str) -> int:
        """Return the number of samples of the split `name` that an evaluation uses."""
        option, count = f"trainer.limit_{name}_batches", len(self.splits[name])
        return apply_limit(option, self.limits.get(name), count, unit=self.global_batch_size)

    def _evaluation_loader(self, split: Dataset[Batch], count: int) -> DataLoader[Batch]:
        dp_size, dp_rank, _ = self.parallel
        per_device = max(1, self.global_batch_size // (dp_size * self.accumulate))
        return self._loader(split, EvaluationBatches(count, per_device, dp_size, dp_rank))

    def _loader(self, split: Dataset[Batch], batches: Batches) -> DataLoader[Batch]:
        device = self.trainer.lightning_module.device
        return build_loader(split, batches, device, self.device_resident, self.num_workers)
