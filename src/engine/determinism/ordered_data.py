"""The data of a run: the engine owns the order of the samples, and a plain LightningDataModule owns the samples."""

import hashlib
from functools import partial
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from src.engine.determinism.batch import Batch, constant_weights
from src.engine.determinism.hashing import hash_ints
from src.engine.determinism.layout import BatchLayout, DataParallelInfo, data_parallel_info
from src.engine.determinism.loader import (
    EVALUATION,
    RankLoader,
    check_loader,
    check_repeatable,
    epoch_order,
    fetch,
)
from src.engine.determinism.sampler import EvaluationBatches, TrainingBatches, apply_limit, total_steps
from src.engine.determinism.seeding import SeededSamples, makes_batches, refuse_draws, seed_generators
from src.engine.utils.errors import UserError

_LOADERS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
_SETUP = -2  # in place of an epoch


class OrderedData(L.LightningDataModule):
    """Divides the batches of any LightningDataModule among the ranks, in an order that no hardware changes.

    The DataModule sees a trainer of one process, so the batch size of its loaders is that of an optimizer step. Each
    loader is taken apart: this class keeps the dataset, `collate_fn`, the sampler and the options of workers. Random
    transforms of the dataset draw from the global generators, which are seeded for each sample.

    The DataModule may have these attributes:

    - `norm_groups`: groups of the global batch over which batch normalization takes its statistics, 4 by default
      (`src/engine/parallel/batch_norm.py`). Each micro-batch must hold whole groups.
    - `batch_size_per_device`: samples per process and micro-batch. If `batch_size` is None, it becomes their product.
    - `has_pairs`: whether a sample needs its partner, half a global batch further on, in the same micro-batch and rank.
    - `description`: some words for the banner.

    Attributes that this class does not have are those of the DataModule.

    Args:
        plain: the user's DataModule.
        seed: determines the order of the samples and the random numbers of their transforms.
        limits: limits of `train`, `val` and `test` per epoch: a number of global batches, or a fraction; None for all.

    Attributes:
        layout: the positions of each global batch that this rank trains; set by `setup` for training.
    """

    layout: BatchLayout

    def __init__(self, plain: L.LightningDataModule, seed: int, limits: dict[str, int | float | None]) -> None:
        super().__init__()
        self.plain, self.run_seed, self.limits = plain, seed, limits
        self.prepare_data_per_node = plain.prepare_data_per_node
        self._start = (0, 0)  # the epoch in which training starts, and the number of its samples already trained
        self._training: TrainingBatches | None = None
        self._loaders: dict[str, list[DataLoader[Any]]] = {}  # of each stage, as the DataModule made them
        self._sample_index = torch.empty(0, dtype=torch.int64)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "plain":  # not yet unpickled
            raise AttributeError(name)
        if hasattr(type(self), name):
            return self.__getattribute__(name)  # a property that has failed, whose own error this shows
        return getattr(self.plain, name)

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
            seed_generators(int(hash_ints(self.run_seed, _SETUP)))
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

    def teardown(self, stage: str) -> None:
        self.plain.teardown(stage)

    def state_dict(self) -> dict[str, Any]:
        return self.plain.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.plain.load_state_dict(state_dict)

    def on_exception(self, exception: BaseException) -> None:
        self.plain.on_exception(exception)

    def train_dataloader(self) -> RankLoader:
        """Return the loader of this rank's share of each global batch."""
        if self.trainer and self.trainer.reload_dataloaders_every_n_epochs:
            self._loaders["train"] = self._own_loaders("train")
        (loader,) = self._loaders["train"]
        order = partial(epoch_order, loader.sampler, self.run_seed)
        self._training = TrainingBatches(self.layout, self.steps_per_epoch, order)
        self._training.epoch, self._training.start = self._start
        return self._rank_loader(loader, self._training)

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

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Call the hook of the DataModule, or that of the module, with the generators seeded for this batch."""
        if not isinstance(batch, Batch):
            epoch = self.trainer.current_epoch if self.trainer.training else EVALUATION
            key = int(hash_ints(self.run_seed, epoch, int(self._sample_index[0])))
            seed_generators(key, self._module.device.type)
        return self._hook("on_before_batch_transfer")(batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Transfer the batch, unless it is on the device already: Lightning's own check of this is slow."""
        if isinstance(batch, Batch) and batch.image.device == device:
            return batch
        return self._hook("transfer_batch_to_device")(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Call the hook of the DataModule, or that of the module; return what the steps of the module take.

        A module that has `takes_batch` gets a `Batch` with its weights; any other module gets what the loader yields,
        or the pair of a `Batch`.
        """
        if isinstance(batch, Batch):
            self._sample_index = batch.sample_index
            batch = self._hook("on_after_batch_transfer")(batch, dataloader_idx)
        else:
            with refuse_draws("on_after_batch_transfer", self._is_divided, self._module.device.type):
                batch = self._hook("on_after_batch_transfer")(batch, dataloader_idx)
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
    def accumulate(self) -> int:
        """Number of accumulated micro-batches per optimizer step."""
        return self.trainer.accumulate_grad_batches

    @property
    def parallel(self) -> DataParallelInfo:
        """The strategy's division of batches among ranks and micro-batches."""
        return data_parallel_info(self.trainer)

    @property
    def _is_divided(self) -> bool:
        return self.parallel.dp_size * self.accumulate > 1

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
        return tuple(tree_leaves(self.example_batch(1))[0].shape[1:])

    def example_batch(self, count: int) -> Any:
        """Return a batch of `count` samples, as the loader makes it; they repeat if there are fewer."""
        loader, positions = self._any_loader, torch.arange(count) % len(self._any_loader.dataset)  # type: ignore[arg-type]
        samples = SeededSamples(loader.dataset, loader.collate_fn)
        batches = [torch.stack([positions, positions])]
        ((self._sample_index, batch),) = fetch(loader, samples, batches, min(1, loader.num_workers))
        return batch

    def training_facts(self) -> str:
        """Return what identifies the training samples: their number, and a hash of their indices and labels."""
        dataset, content = cast(Any, self._loaders["train"][0].dataset), hashlib.sha256()
        count = self._count(self._loaders["train"][0])
        while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # a Subset, perhaps of another one
            content.update(_bytes_of(dataset.indices))
            dataset = dataset.dataset
        content.update(_bytes_of(getattr(dataset, "labels", getattr(dataset, "targets", []))))
        return f"{count} samples, SHA-256 {content.hexdigest()[:12]}"

    def _set_batch_size(self) -> None:
        plain: Any = self.plain
        if getattr(plain, "batch_size", 0) is None and getattr(plain, "batch_size_per_device", None):
            processes = self.parallel.num_microbatches * self.parallel.dp_size
            plain.batch_size = plain.batch_size_per_device * self.accumulate * processes

    def _own_loaders(self, name: str) -> list[DataLoader[Any]]:
        """Return the DataModule's loaders of `train`, `val`, `test` or `predict`."""
        method = f"{name}_dataloader"
        if not is_overridden(method, self.plain, L.LightningDataModule):
            return []
        with isolate_rng(include_cuda=False):
            seed_generators(int(hash_ints(self.run_seed, _SETUP, self.trainer.current_epoch)))
            returned = getattr(self.plain, method)()
        loaders = list(returned.values()) if isinstance(returned, dict) else returned
        loaders = list(loaders) if isinstance(loaders, list | tuple) else [loaders]
        for loader in loaders:
            check_loader(loader, f"{type(self.plain).__name__}.{method}")
        if name == "train" and len(loaders) != 1:
            raise UserError(
                f"{type(self.plain).__name__}.{method} returns {len(loaders)} loaders: return one, of a dataset that "
                "combines theirs"
            )
        return loaders

    def _check_training(self) -> None:
        loader = self._loaders["train"][0]
        groups, has_pairs = getattr(self.plain, "norm_groups", 4), getattr(self.plain, "has_pairs", False)
        self.layout = BatchLayout(self.global_batch_size, self.parallel, self.accumulate, groups, has_pairs)
        if self.global_batch_size > self._count(loader):
            raise UserError(
                f"data.batch_size={self.global_batch_size} exceeds the {self._count(loader)} samples to train on"
            )
        if self.layout.is_uneven and not self._takes_batch:
            raise UserError(
                f"{type(self._module).__name__} averages over the batch of its own process, but the "
                f"{self.parallel.dp_size} processes have different numbers of samples: set a data.batch_size that "
                "divides among them and no strategy.shares, or let the module take a Batch and use its weights"
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

    def _rank_loader(self, loader: DataLoader[Any], batches: TrainingBatches | EvaluationBatches) -> RankLoader:
        device = self.trainer.strategy.root_device  # the module may not be there yet, if it counts its steps in `setup`
        on_batch = partial(setattr, self, "_sample_index")
        return RankLoader(loader, batches, self.run_seed, device, on_batch, self._is_divided)

    def _evaluation_loaders(self, name: str) -> Any:
        batches = [(loader, self._evaluation_batches(name, loader)) for loader in self._loaders[name]]
        loaders = [self._rank_loader(loader, share) for loader, share in batches if share.num_samples]
        return loaders[0] if len(loaders) == 1 else loaders

    def _evaluation_batches(self, name: str, loader: DataLoader[Any]) -> EvaluationBatches:
        order, size = epoch_order(loader.sampler, self.run_seed, EVALUATION), cast(int, loader.batch_size)
        parallel = self.parallel
        if name == "predict":  # all ranks gather as many predictions
            parallel = DataParallelInfo(parallel.dp_size, parallel.dp_rank)
        return EvaluationBatches(order[: self._evaluated(name, loader)], size // self.accumulate, parallel)

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


def _bytes_of(values: Any) -> bytes:
    """Return bytes that identify indices or labels: numbers in an array, a tensor or a list, or anything else."""
    try:
        array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.asarray(0)
    return repr(values).encode() if array.dtype == object else array.tobytes()


class OneProcess:
    """The trainer as a run on one process without accumulation has it; all other attributes are the trainer's."""

    world_size = num_devices = num_nodes = accumulate_grad_batches = 1
    global_rank = local_rank = node_rank = 0

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name == "_trainer":  # not yet unpickled
            raise AttributeError(name)
        return getattr(self._trainer, name)
