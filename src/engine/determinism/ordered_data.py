"""The data of a run: the engine owns the order of the samples, and a plain LightningDataModule owns the samples."""

from functools import partial
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from src.engine.determinism.batch import Batch, StepPart, StepParts, as_part, constant_weights, join
from src.engine.determinism.hashing import hash_ints
from src.engine.determinism.layout import BatchLayout, DataParallelInfo, OneProcess, data_parallel_info, virtual_layouts
from src.engine.determinism.loader import (
    EVALUATION,
    SETUP,
    RankLoader,
    check_repeatable,
    epoch_order,
    fetch,
    loaders_of,
)
from src.engine.determinism.plain_data import WithPlainData
from src.engine.determinism.sampler import EvaluationBatches, TrainingBatches, apply_limit, total_steps
from src.engine.determinism.seeding import SeededSamples, makes_batches, refuse_draws, seed_generators
from src.engine.utils.errors import UserError

_LOADERS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class OrderedData(WithPlainData):
    """Divides the batches of any LightningDataModule among the ranks, in an order that no hardware changes.

    A batch of Lightning is a step in parts: micro-batches, or virtual ranks one by one (`src/engine/run/parts.py`).

    The DataModule sees a trainer of one process, so the batch size of its loaders is that of an optimizer step. Each
    loader is taken apart: this class keeps the dataset, `collate_fn`, the sampler and the options of workers. Random
    transforms of the dataset draw from the global generators, which are seeded for each sample.

    The DataModule may have these attributes:

    - `batch_size_per_device`: samples per process and micro-batch. If `batch_size` is None, it becomes their product.
    - `has_pairs`: whether a sample needs its partner, half a global batch further on, in the same micro-batch and rank.
    - `description`: some words for the banner.

    Args:
        plain: the user's DataModule.
        seed: determines the order of the samples and the random numbers of their transforms.
        limits: limits of `train`, `val` and `test` per epoch: a number of global batches, or a fraction; None for all.
        accumulate: micro-batches per optimizer step.
        virtual_ranks: number of ranks of the run. Position p of a global batch belongs to rank p % virtual_ranks.
        bit_exact: compute them one by one, not together.

    Attributes:
        layout: the positions of each global batch that this rank trains; set by `setup` for training. With `bit_exact`,
            those of its first virtual rank.
        parts: the parts of the current step.
    """

    layout: BatchLayout

    def __init__(
        self,
        plain: L.LightningDataModule,
        seed: int,
        limits: dict[str, int | float | None],
        accumulate: int = 1,
        virtual_ranks: int = 4,
        bit_exact: bool = False,
    ) -> None:
        super().__init__()
        self.run_seed, self.limits = seed, limits
        self.accumulate, self.virtual_ranks, self.bit_exact = accumulate, virtual_ranks, bit_exact
        self.prepare_data_per_node = plain.prepare_data_per_node
        self.parts = StepParts()
        self._positions = torch.empty(0)  # of this rank in a global batch, (parts, n); set with `layout`
        self._start = (0, 0)  # the epoch in which training starts, and the number of its samples already trained
        self._training: TrainingBatches | None = None
        self._loaders: dict[str, list[DataLoader[Any]]] = {}  # of each stage, as the DataModule made them
        self._sample_index = torch.empty(0, dtype=torch.int64)
        self.plain = plain  # the last: others are set on it

    def prepare_data(self) -> None:
        self.plain.trainer = cast(L.Trainer, OneProcess(cast(L.Trainer, self.trainer)))
        self.plain.prepare_data()

    def setup(self, stage: str) -> None:
        """Set the DataModule up, with random numbers of the run's seed, and take its loaders apart.

        Raises:
            UserError: if the order of a loader cannot be the engine's, there are too few samples, or the ranks' shares
                do not suit the module.
        """
        self.plain.trainer = cast(L.Trainer, OneProcess(cast(L.Trainer, self.trainer)))
        self._set_batch_size()
        with isolate_rng(include_cuda=False):
            seed_generators(int(hash_ints(self.run_seed, SETUP)))
            self.plain.setup(stage)
        for name in _LOADERS[stage]:
            self._loaders[name] = self._own_loaders(name)
        if not self._loaders[_LOADERS[stage][0]]:
            raise UserError(
                f"{type(self.plain).__name__} has no {_LOADERS[stage][0]}_dataloader: add it, or leave this stage out "
                "(fit=false, test=false)"
            )
        if stage == "fit":
            self._check_training()
        self._check_evaluation(stage)

    def train_dataloader(self) -> RankLoader:
        """Return the loader of this rank's share of each global batch."""
        if self.trainer and self.trainer.reload_dataloaders_every_n_epochs:
            self._loaders["train"] = self._own_loaders("train")
        (loader,) = self._loaders["train"]
        order = partial(epoch_order, loader.sampler, self.run_seed)
        self._training = TrainingBatches(self.global_batch_size, self._positions, self.steps_per_epoch, order)
        self._training.epoch, self._training.start = self._start
        return self._rank_loader(loader, self._training, len(self._positions))

    def resume(self, epoch: int, samples: int) -> None:
        """Let training start in an epoch of which so many samples are trained already."""
        self._start = (epoch, samples)
        if self._training:  # a module that counts its steps in `setup` has asked for the loader already
            self._training.epoch, self._training.start = self._start

    def val_dataloader(self) -> Any:
        """Return this rank's loader of validation samples, a list of several, or an empty list."""
        return self._evaluation_loaders("val")

    def test_dataloader(self) -> Any:
        """Return this rank's loader of test samples, a list of several, or an empty list."""
        return self._evaluation_loaders("test")

    def predict_dataloader(self) -> Any:
        """Return this rank's loader of samples to predict, or a list of several."""
        return self._evaluation_loaders("predict")

    def on_before_batch_transfer(self, batch: StepParts, dataloader_idx: int) -> StepParts:
        """Call the hook of the DataModule, or that of the module, with the generators seeded for each part."""
        return batch.map(self._before_transfer, dataloader_idx)

    def transfer_batch_to_device(self, batch: StepParts, device: torch.device, dataloader_idx: int) -> StepParts:
        """Call the hook of the DataModule, or that of the module, for each part."""
        return batch.map(self._transfer, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: StepParts, dataloader_idx: int) -> Any:
        """Call the hook of the DataModule, or that of the module, for each part; return what the hooks of a step get.

        That is the batch of one part, or micro-batches joined to one. Of several virtual ranks it is the batch of the
        first, as each process of DistributedDataParallel sees the batch of its own rank.
        """
        self.parts = batch.map(self._after_transfer, dataloader_idx)
        self.end_parts()
        batches = [part.batch for part in self.parts]
        return batches[0] if self.bit_exact or len(batches) == 1 else join(batches)

    def begin_part(self, part: StepPart) -> None:
        """Let `sample_index` be that of a part of the step."""
        self._sample_index = part.samples

    def end_parts(self) -> None:
        """Let `sample_index` be that of what the hooks of a step get."""
        samples = [part.samples for part in self.parts]
        self._sample_index = samples[0] if self.bit_exact or len(samples) == 1 else torch.cat(samples)

    def _seed(self, part: StepPart, *hook: int) -> None:
        epoch = self.trainer.current_epoch if self.trainer.training else EVALUATION
        seed_generators(int(hash_ints(self.run_seed, epoch, int(part.samples[0]), *hook)), self._module.device.type)

    def _before_transfer(self, part: StepPart, dataloader_idx: int) -> Any:
        if not isinstance(part.batch, Batch):
            self._seed(part)
        return self._hook("on_before_batch_transfer")(part.batch, dataloader_idx)

    def _transfer(self, part: StepPart, device: torch.device, dataloader_idx: int) -> Any:
        if isinstance(part.batch, Batch) and part.batch.image.device == device:
            return part.batch  # Lightning's own check of this is slow
        if self.bit_exact:
            self._seed(part, 1)
        return self._hook("transfer_batch_to_device")(part.batch, device, dataloader_idx)

    def _after_transfer(self, part: StepPart, dataloader_idx: int) -> Any:
        """Return what the steps of the module take.

        A module that has `takes_batch` gets a `Batch` with its weights; any other module gets what the loader yields,
        or the pair of a `Batch`.
        """
        self.begin_part(part)
        if isinstance(part.batch, Batch):
            batch = self._hook("on_after_batch_transfer")(part.batch, dataloader_idx)
        else:
            if self.bit_exact:
                self._seed(part, 2)
            with refuse_draws("on_after_batch_transfer", self.is_divided, self._module.device.type):
                batch = self._hook("on_after_batch_transfer")(part.batch, dataloader_idx)
        if not self._takes_batch:
            if not isinstance(batch, Batch):
                return batch
            # A prediction keeps its padding, because all ranks gather as many predictions.
            kept = batch.weight > 0 if self.trainer.evaluating else slice(None)
            return batch.image[kept], batch.target[kept]
        if isinstance(batch, Batch):
            return batch._replace(weight=self._weights(batch.weight))
        if not isinstance(batch, list | tuple) or len(batch) != 2 or not isinstance(batch[0], Tensor):
            raise UserError(
                f"{type(self._module).__name__} takes pairs of a tensor and targets (takes_batch), but the loader "
                f"yields {type(batch).__name__}: leave takes_batch out, and let training_step compute the loss"
            )
        inputs, target = batch
        return Batch(inputs, target, self.sample_index, self._weights(torch.ones(len(inputs), device=inputs.device)))

    @property
    def sample_index(self) -> Tensor:
        """The samples of the current batch, (n,): their positions in the dataset, on the device of the module."""
        return self._sample_index.to(self.trainer.lightning_module.device, non_blocking=True)

    @property
    def parallel(self) -> DataParallelInfo:
        """The strategy's division of batches among ranks and micro-batches."""
        return data_parallel_info(self.trainer)

    @property
    def own_virtual_ranks(self) -> range:
        """The virtual ranks that this rank computes one by one, in training and in evaluation."""
        return self.parallel.virtual_ranks(self.virtual_ranks)

    @property
    def is_divided(self) -> bool:
        """Whether ranks or accumulated micro-batches hold parts of a global batch."""
        return not self.bit_exact and self.parallel.dp_size * self.accumulate > 1

    @property
    def global_batch_size(self) -> int:
        """Number of samples per optimizer step, over all processes and micro-batches."""
        return cast(int, self._any_loader.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps per epoch."""
        steps = self._count(self._loaders["train"][0]) // self.global_batch_size
        return apply_limit("trainer.limit_train_batches", self.limits["train"], steps)

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of the run: the horizon of learning-rate schedules."""
        return total_steps(self.trainer.max_epochs, self.trainer.max_steps, self.steps_per_epoch)

    def evaluated_samples(self, name: str) -> int:
        """Return the number of samples of all loaders of `val` or `test` that an evaluation uses."""
        return sum(self._evaluated(name, loader) for loader in self._loaders.get(name, []))

    @property
    def has_training_data(self) -> bool:
        """Whether the training samples are set up: not in an evaluation."""
        return "train" in self._loaders

    @property
    def description(self) -> str:
        """Some words about the data, for the banner and the loggers."""
        name = getattr(self.plain, "description", None) or type(self.plain).__name__
        return f"{name}, {self._count(self._loaders['train'][0]):,} samples" if self.has_training_data else name

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample's first tensor."""
        return tuple(tree_leaves(self.example_batch(1)[0].batch)[0].shape[1:])

    def example_batch(self, count: int, first: int = 0) -> StepParts:
        """Return a batch of `count` samples as one part, as a loader yields it; they repeat if there are fewer."""
        loader = self._any_loader
        positions = torch.arange(first, first + count) % len(loader.dataset)  # type: ignore[arg-type]
        samples = SeededSamples(loader.dataset, loader.collate_fn)
        batches = [torch.stack([positions, positions])]
        (fetched,) = fetch(loader, samples, batches, min(1, loader.num_workers))
        return StepParts([as_part(*fetched)])

    @property
    def training_samples(self) -> tuple[Any, int]:
        """The dataset of the training samples, and the number of samples in an epoch."""
        loader = self._loaders["train"][0]
        return loader.dataset, self._count(loader)

    def _set_batch_size(self) -> None:
        plain: Any = self.plain
        if getattr(plain, "batch_size", 0) is None and getattr(plain, "batch_size_per_device", None):
            processes = self.parallel.num_microbatches * self.parallel.dp_size
            plain.batch_size = plain.batch_size_per_device * self.accumulate * processes

    def _own_loaders(self, name: str) -> list[DataLoader[Any]]:
        return loaders_of(self.plain, name, int(hash_ints(self.run_seed, SETUP, self.trainer.current_epoch)))

    def _check_training(self) -> None:
        loader = self._loaders["train"][0]
        batch, has_pairs = self.global_batch_size, getattr(self.plain, "has_pairs", False)
        if self.bit_exact:
            virtual = virtual_layouts(batch, self.parallel, self.virtual_ranks, has_pairs)
            self.layout, self._positions = virtual[0], torch.cat([layout.positions for layout in virtual])
        else:
            self.layout = BatchLayout(batch, self.parallel, self.accumulate, self.virtual_ranks, has_pairs)
            self._positions = self.layout.positions
        if self.global_batch_size > self._count(loader):
            raise UserError(
                f"data.batch_size={self.global_batch_size} exceeds the {self._count(loader)} samples to train on"
            )
        if self.layout.is_uneven and not self._takes_batch:
            raise UserError(
                f"{type(self._module).__name__} averages over the batch of its own process, but the "
                f"{self.parallel.dp_size} processes have different numbers of samples: set a data.batch_size that "
                "divides among them and no strategy.shares, let the module take a Batch and use its weights, or set "
                "bit_exact=true"
            )
        if not self.steps_per_epoch:
            raise UserError("trainer.limit_train_batches=0 trains nothing: set fit=false instead")
        check_repeatable(loader, self.run_seed, f"{type(self.plain).__name__}.train_dataloader")

    def _check_evaluation(self, stage: str) -> None:
        """Check that each rank has a sample in each batch, unless padding has a weight of zero; and can be gathered."""
        for name in _LOADERS[stage]:
            for loader in self._loaders[name]:
                is_batched = makes_batches(loader.dataset)
                if name in ("val", "test") and not (self._takes_batch and is_batched):
                    self._evaluation_batches(name, loader).check_no_rank_is_empty(name)
                if name == "predict" and not is_batched:
                    raise UserError(
                        f"predict: {type(self.plain).__name__}.predict_dataloader is not one of image files, the only "
                        "samples of which predictions.csv is written: leave `predict` out, and load the checkpoint"
                    )

    def _rank_loader(
        self, loader: DataLoader[Any], batches: TrainingBatches | EvaluationBatches, parts: int = 1
    ) -> RankLoader:
        device = self.trainer.strategy.root_device  # the module may not be there yet, if it counts its steps in `setup`
        return RankLoader(loader, batches, self.run_seed, device, self.is_divided, parts)

    def _evaluation_loaders(self, name: str) -> Any:
        batches = [(loader, self._evaluation_batches(name, loader)) for loader in self._loaders[name]]
        loaders = [self._rank_loader(loader, share) for loader, share in batches if share.num_samples]
        return loaders[0] if len(loaders) == 1 else loaders

    def _evaluation_batches(self, name: str, loader: DataLoader[Any]) -> EvaluationBatches:
        order, size = epoch_order(loader.sampler, self.run_seed, EVALUATION), cast(int, loader.batch_size)
        parallel, ranks = self.parallel, None
        if name == "predict":  # all ranks gather as many predictions
            parallel = DataParallelInfo(parallel.dp_size, parallel.dp_rank)
        elif self.bit_exact:
            parallel, ranks = DataParallelInfo(self.virtual_ranks), self.own_virtual_ranks
        return EvaluationBatches(order[: self._evaluated(name, loader)], size // self.accumulate, parallel, ranks)

    def _evaluated(self, name: str, loader: DataLoader[Any]) -> int:
        option = f"trainer.limit_{name}_batches"
        return apply_limit(option, self.limits.get(name), self._count(loader), unit=cast(int, loader.batch_size))

    @staticmethod
    def _count(loader: DataLoader[Any]) -> int:
        return len(cast(Any, loader.sampler))

    def _weights(self, weight: Tensor) -> Tensor:
        """Return the (n,) weights of samples in the loss: its sum over the ranks is a mean in training, else a sum."""
        if not self.trainer.training:
            return weight.to(self._module.dtype)
        return constant_weights(len(weight), 1 / self.layout.mean_samples_per_batch, self._module.dtype, weight.device)

    def _hook(self, name: str) -> Any:
        """Return the DataModule's own hook, or else the module's, as Lightning would choose."""
        is_own = is_overridden(name, self.plain, L.LightningDataModule)
        return getattr(self.plain if is_own else self._module, name)

    @property
    def _any_loader(self) -> DataLoader[Any]:
        return next(loader for loaders in self._loaders.values() for loader in loaders)

    @property
    def _module(self) -> Any:
        return self.trainer.lightning_module

    @property
    def _takes_batch(self) -> bool:
        return self._module is None or getattr(self._module, "takes_batch", False)
