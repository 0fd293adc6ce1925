"""The LightningDataModule of all image datasets: splits, global batches, augmentation on the device."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from src.data.augment.augmentation import Augmentation
from src.data.batch import Batch, as_pair
from src.data.image_files import ImageFolder
from src.data.layout import BatchLayout, DataParallelInfo, data_parallel_info
from src.data.limits import apply_limit, check_image_shape, check_sizes, total_steps
from src.data.loader import build_loader, check_residency
from src.data.preprocessing import Preprocessing
from src.data.sampler import Batches, EvaluationBatches, TrainingBatches
from src.data.sources.source import ImageSource
from src.data.splits import ImageSplit, divide, load_sets
from src.data.transforms import TransformedSplit
from src.utils.errors import UserError

_layout = lru_cache(maxsize=1)(BatchLayout)  # asked for in every step


class ImageDataModule(L.LightningDataModule):
    """Global batches of images, and augmentation that depends only on seed, epoch, step and sample.

    Without a Trainer, in a notebook, it gives the batches of one process.

    Args:
        source: finds or creates the files of the dataset, and reads them.
        num_classes, image_shape, mean, std: properties of the dataset. The shape is (channels, height, width); mean
            and std are per channel, in [0, 1].
        augment: the augmentation of training images.
        root: folder of the source's files.
        batch_size: samples per optimizer step, over all processes and accumulated micro-batches.
        batch_size_per_device: samples per process and micro-batch, as an alternative to `batch_size`.
        norm_groups: groups of the global batch over which batch normalization takes its statistics
            (`src/strategies/batch_norm.py`). Each micro-batch must hold whole groups.
        val_fraction: fraction of each class of the training set for validation; None for the dataset's own validation
            images or, without these, a tenth.
        train_samples: train on this many images only, the same fraction of each class; null for all.
        predict_dir: folder of image files to classify in prediction.
        num_workers: processes that fetch batches; 0 is usually fastest for images in memory.
        device_resident: keep the images on the device and transfer only indices; `auto`: if its memory is large enough.
        seed: determines the validation split, the order of the samples and their augmentation.
        limits: limits of `train`, `val` and `test` per epoch: a number of global batches, or a fraction.

    Raises:
        UserError: if both or no batch sizes are given, the batch does not divide among the processes, or a value is
            out of its range.
    """

    sample_index: Tensor  # of the current batch, (n,), on its device; callbacks read it

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
        super().__init__()
        check_sizes(batch_size, batch_size_per_device, norm_groups, val_fraction, train_samples)
        check_image_shape(image_shape, mean, std, augment.crop_padding)
        check_residency(device_resident, num_workers, bool(augment.transforms))
        self.source, self.root, self.num_classes = source, Path(root), num_classes
        self.image_shape, self.mean, self.std = cast(tuple[int, int, int], tuple(image_shape)), mean, std
        self.batch_size, self.batch_size_per_device = batch_size, batch_size_per_device
        self.norm_groups, self.val_fraction, self.train_samples = norm_groups, val_fraction, train_samples
        self.augment, self.predict_dir = augment, predict_dir
        self.preprocessing = Preprocessing(augment, mean, std, num_classes, seed)
        # Transforms run on the host, and so does the fetching of all splits, which share their images.
        self.num_workers, self.device_resident = num_workers, False if augment.transforms else device_resident
        self.seed, self.limits = seed, limits or {}
        self.resume_at = (0, 0)  # the epoch, and the number of its samples already trained
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
        self.augment.samples = len(self.splits["train"].dataset.labels)
        if self.global_batch_size > len(self.splits["train"]):
            raise UserError(
                f"data.batch_size={self.global_batch_size} exceeds the {len(self.splits['train'])} images to train on"
            )
        if stage == "fit" and self.layout.is_uneven and not self._takes_batch:
            raise UserError(
                f"{type(self._module).__name__} averages over the batch of its own process, but the "
                f"{self.parallel.dp_size} processes have different numbers of samples: set a data.batch_size that "
                "divides among them and no strategy.shares, or let the module take a Batch and use its weights"
            )
        if not self._takes_batch:
            for name in ("val", "test"):
                self._evaluation_batches(self.evaluated_samples(name)).check_no_rank_is_empty(name)
        if stage == "fit" and not self.steps_per_epoch:
            raise UserError("trainer.limit_train_batches=0 trains nothing: set fit=false instead")

    def train_dataloader(self) -> DataLoader[Batch]:
        split = self.splits["train"]
        batches = TrainingBatches(len(split), self.layout, self.seed, self.steps_per_epoch)
        batches.epoch, batches.start = self.resume_at
        transforms = self.augment.transforms
        return self._loader(TransformedSplit(split, transforms, self.seed, batches) if transforms else split, batches)

    def val_dataloader(self) -> DataLoader[Batch] | list[Any]:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader[Batch] | list[Any]:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[Batch]:
        folder = ImageFolder(Path(str(self.predict_dir)), self.image_shape)
        # All ranks gather as many predictions, so the shares are equal.
        parallel = replace(self.parallel, shares=None)
        return self._loader(folder, EvaluationBatches(len(folder), self._evaluation_batch_size, parallel))

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Transfer the batch, unless it is on the device already: Lightning's own check of this is slow."""
        if batch.image.device == device:
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch | tuple[Tensor, Tensor]:
        """Normalize the images on the device and, in training, augment them.

        Returns:
            The batch, or the pair (images, targets) for a module without `takes_batch`.
        """
        trainer, dtype = self.trainer, cast(torch.dtype, self.trainer.lightning_module.dtype)
        self.sample_index = batch.sample_index
        if trainer.training:
            batch = self.preprocessing.augment(batch, self.layout, trainer.current_epoch, trainer.global_step, dtype)
        else:
            batch = self.preprocessing.normalize(batch, dtype)
        if self._takes_batch:
            return batch
        # A prediction keeps its padding, because all ranks gather as many predictions.
        return as_pair(batch, drop_padding=trainer.evaluating)

    def augment_batch(self, batch: Batch, epoch: int = 0, step: int = 0) -> Batch:
        """Augment and normalize a batch of the training loader as the given step does; `to_pixels` shows the images."""
        return self.preprocessing.augment(batch, self.layout, epoch, step, torch.float32)

    def to_pixels(self, image: Tensor) -> Tensor:
        """Undo the normalization, and return (n, channels, height, width) images in [0, 1]."""
        return self.preprocessing.to_pixels(image)

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the classes, by which a checkpoint predicts without the dataset."""
        return {"classes": self.classes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_classes = state_dict["classes"]

    @property
    def classes(self) -> list[str]:
        """Names of the classes in the order of the labels; their numbers if the dataset has no names."""
        return list(self.source.classes) or self._saved_classes or [str(label) for label in range(self.num_classes)]

    @property
    def accumulate(self) -> int:
        """Number of accumulated micro-batches per optimizer step."""
        return self.trainer.accumulate_grad_batches if self.trainer else 1

    @property
    def global_batch_size(self) -> int:
        """Number of samples per optimizer step, over all processes and micro-batches."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.batch_size_per_device is not None
        return self.batch_size_per_device * self.accumulate * self.parallel.num_microbatches * self.parallel.dp_size

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps per epoch."""
        steps = len(self.splits["train"]) // self.global_batch_size
        return apply_limit("trainer.limit_train_batches", self.limits.get("train"), steps)

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of the run: the horizon of learning-rate schedules."""
        return total_steps(self.trainer.max_epochs, self.trainer.max_steps, self.steps_per_epoch)

    @property
    def parallel(self) -> DataParallelInfo:
        """The strategy's division of batches among ranks and micro-batches."""
        return data_parallel_info(self.trainer)

    @property
    def layout(self) -> BatchLayout:
        """The positions of each global batch that this process trains."""
        has_pairs = bool(self.augment.mixers)
        return _layout(self.global_batch_size, self.parallel, self.accumulate, self.norm_groups, has_pairs)

    @property
    def samples_per_micro_batch(self) -> int:
        """Number of samples that this process passes through the network at once."""
        return self.layout.samples_per_batch // self.parallel.num_microbatches

    def evaluated_samples(self, name: str) -> int:
        """Return the number of samples of the split `name` that an evaluation uses."""
        option, count = f"trainer.limit_{name}_batches", len(self.splits[name])
        return apply_limit(option, self.limits.get(name), count, unit=self.global_batch_size)

    def _evaluation_loader(self, name: str) -> DataLoader[Batch] | list[Any]:
        count = self.evaluated_samples(name)
        return self._loader(self.splits[name], self._evaluation_batches(count)) if count else []  # [] disables it

    def _loader(self, data: Dataset[Batch], batches: Batches) -> DataLoader[Batch]:
        device = self._module.device if self._module else torch.device("cpu")
        return build_loader(data, batches, device, self.device_resident, self.num_workers)

    def _evaluation_batches(self, count: int) -> EvaluationBatches:
        return EvaluationBatches(count, self._evaluation_batch_size, self.parallel)

    @property
    def _evaluation_batch_size(self) -> int:
        return self.global_batch_size // self.accumulate

    @property
    def _module(self) -> Any:
        return self.trainer.lightning_module if self.trainer else None

    @property
    def _takes_batch(self) -> bool:
        return self._module is None or getattr(self._module, "takes_batch", False)
