"""The base class of data modules: each process gets its share of global batches, which no hardware changes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from src.engine.determinism.batch import Batch, as_pair
from src.engine.determinism.dataset import ImageSplit, Transform, TransformedSplit
from src.engine.determinism.layout import BatchLayout, DataParallelInfo, data_parallel_info
from src.engine.determinism.limits import apply_limit, check_sizes, total_steps
from src.engine.determinism.loader import build_loader, check_residency
from src.engine.determinism.sampler import Batches, EvaluationBatches, TrainingBatches
from src.engine.utils.errors import UserError


class DataModule(L.LightningDataModule):
    """A LightningDataModule whose loaders divide each global batch among processes and micro-batches.

    A subclass sets `splits` in its `setup`, and then calls `check_batches`. Without a Trainer, in a notebook, the
    loaders give the batches of one process.

    Args:
        batch_size: samples per optimizer step, over all processes and accumulated micro-batches.
        batch_size_per_device: samples per process and micro-batch, as an alternative to `batch_size`.
        norm_groups: groups of the global batch over which batch normalization takes its statistics
            (`src/engine/parallel/batch_norm.py`). Each micro-batch must hold whole groups.
        num_workers: processes that fetch batches; 0 is usually fastest for images in memory.
        device_resident: keep the images on the device and transfer only indices; `auto`: if its memory is large enough.
        seed: determines the order of the samples and the random numbers of transforms.
        limits: limits of `train`, `val` and `test` per epoch: a number of global batches, or a fraction.

    Attributes:
        has_pairs: whether samples are mixed with a partner, which then is in the same micro-batch and process.
        splits: the splits `train`, `val` and `test`; empty before `setup`.
        resume_at: the epoch in which training starts, and the number of its samples already trained.
        sample_index: the samples of the current batch, (n,), on its device; callbacks read it.
    """

    sample_index: Tensor
    has_pairs = False

    def __init__(
        self,
        batch_size: int | None,
        batch_size_per_device: int | None,
        norm_groups: int,
        num_workers: int,
        device_resident: str | bool,
        seed: int,
        limits: dict[str, int | float] | None,
    ) -> None:
        super().__init__()
        check_sizes(batch_size, batch_size_per_device, norm_groups)
        check_residency(device_resident, num_workers)
        self.batch_size, self.batch_size_per_device, self.norm_groups = batch_size, batch_size_per_device, norm_groups
        self.num_workers, self.device_resident = num_workers, device_resident
        self.seed, self.limits = seed, limits or {}
        self.resume_at = (0, 0)
        self.splits: dict[str, ImageSplit] = {}

    def check_batches(self, stage: str) -> None:
        """Check that the splits fill the global batches, and that the module can use the shares of the processes.

        Raises:
            UserError: if there are too few samples, or a share is empty or uneven for a module that takes pairs.
        """
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

    def training_loader(self, transforms: Sequence[Transform] = ()) -> DataLoader[Batch]:
        """Return the loader of this process's batches of `train`, whose images go through the transforms."""
        split = self.splits["train"]
        batches = TrainingBatches(len(split), self.layout, self.seed, self.steps_per_epoch)
        batches.epoch, batches.start = self.resume_at
        return self._loader(TransformedSplit(split, transforms, self.seed, batches) if transforms else split, batches)

    def evaluation_loader(self, name: str) -> DataLoader[Batch] | list[Any]:
        """Return the loader of this process's share of `val` or `test`; an empty list, if nothing is evaluated."""
        count = self.evaluated_samples(name)
        return self._loader(self.splits[name], self._evaluation_batches(count)) if count else []

    def prediction_loader(self, data: Dataset[Batch]) -> DataLoader[Batch]:
        """Return the loader of this process's share of images to predict."""
        # All ranks gather as many predictions, so the shares are equal.
        parallel = replace(self.parallel, shares=None)
        return self._loader(data, EvaluationBatches(len(data), self._evaluation_batch_size, parallel))  # type: ignore[arg-type]

    def to_step_input(self, batch: Batch) -> Batch | tuple[Tensor, Tensor]:
        """Return what the steps of the module take: the batch, or (images, targets) without `takes_batch`."""
        self.sample_index = batch.sample_index
        if self._takes_batch:
            return batch
        # A prediction keeps its padding, because all ranks gather as many predictions.
        return as_pair(batch, drop_padding=self.trainer.evaluating)

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
        return BatchLayout(self.global_batch_size, self.parallel, self.accumulate, self.norm_groups, self.has_pairs)

    @property
    def samples_per_micro_batch(self) -> int:
        """Number of samples that this process passes through the network at once."""
        return self.layout.samples_per_batch // self.parallel.num_microbatches

    def evaluated_samples(self, name: str) -> int:
        """Return the number of samples of the split `name` that an evaluation uses."""
        option, count = f"trainer.limit_{name}_batches", len(self.splits[name])
        return apply_limit(option, self.limits.get(name), count, unit=self.global_batch_size)

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
