"""The data of a run: the engine owns the order of the samples, and a plain LightningDataModule owns the samples."""

from collections.abc import Sequence
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader

from onecurve.data.batch import Batch, StepPart, StepParts, batch_of_hooks, combine, constant_weights
from onecurve.data.layout import BatchLayout, DataParallelInfo, Division
from onecurve.data.limits import total_steps
from onecurve.data.loaders import EvaluationLoaders, TrainingLoaders, loaders_of
from onecurve.data.module_data import ModuleTrainer, OneProcess, as_one_process
from onecurve.data.rank_loader import examples
from onecurve.errors import UserError
from onecurve.patches.torch import tree_unflatten
from onecurve.random.hashing import hash_ints
from onecurve.random.seeding import FETCHING, SETUP, drawing_epoch, refuse_draws, seed_generators

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class OrderedData(L.LightningDataModule):
    """Divides the batches of any LightningDataModule among the ranks, in an order that no hardware changes.

    A batch of Lightning is a step in parts: micro-batches, or virtual ranks one by one (`run/step.py`).

    The DataModule sees a trainer of one process, so the batch size of its loaders is that of an optimizer step. Each
    loader is taken apart: this class keeps the dataset, `collate_fn`, the sampler and the options of workers. Random
    transforms of the dataset draw from the global generators, which are seeded for each sample. What callbacks,
    checkpoints and loggers do with the data of a run reaches the DataModule. `onecurve/protocols.py` has the attributes
    that it may offer.

    Args:
        plain: the user's DataModule.
        seed: determines the order of the samples and the random numbers of their transforms.
        limits: limits of `train`, `val`, `test` and `predict`: a number of global batches, or a fraction; None for all.
        accumulate: micro-batches per optimizer step.
        virtual_ranks: number of ranks of the run. Position p of a global batch belongs to rank p % virtual_ranks.
        bit_exact: compute them one by one, not together.

    Attributes:
        parts: the parts of the current step.
        given: the user's loaders of `train`, `val`, `test` and `predict`, in the collections that hold them.
    """

    plain: L.LightningDataModule

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
        self.parts, self.given = StepParts(), dict[str, Any]()
        self._resumed: tuple[int, int, list[Any]] = (0, 0, [])  # see `resume`
        self._training: TrainingLoaders | None = None
        self._evaluation: dict[str, EvaluationLoaders] = {}
        self._sample_index = torch.empty(0, dtype=torch.int64)
        self.plain = plain  # the last: others are set on it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "plain":  # not yet unpickled
            raise AttributeError(name)
        if hasattr(type(self), name):
            return self.__getattribute__(name)  # a property that has failed, whose own error this shows
        return getattr(self.plain, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the DataModule, as callbacks do by `trainer.datamodule`, unless this class has it."""
        is_own = name in vars(self) or hasattr(type(self), name) or name in type(self).__annotations__
        if is_own or "plain" not in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self.plain, name, value)

    def prepare_data(self) -> None:
        self.plain.trainer = cast(L.Trainer, OneProcess(cast(L.Trainer, self.trainer)))
        self.plain.prepare_data()

    def setup(self, stage: str) -> None:
        """Set the DataModule up, with random numbers of the run's seed, and take its loaders apart.

        Raises:
            UserError: if the order of a loader cannot be the engine's, there are too few samples, or the ranks' shares
                do not suit the module.
        """
        trainer = cast(L.Trainer, self.trainer)
        self.plain.trainer = cast(L.Trainer, OneProcess(trainer))
        if self._module is not None:  # before its own `setup`, `configure_model` and `configure_optimizers`
            self._module.trainer = ModuleTrainer(trainer, self.virtual_ranks if self.bit_exact else 1)
        if stage == "fit":
            self._training = None
        self._set_batch_size()
        with isolate_rng(include_cuda=False), as_one_process():
            seed_generators(int(hash_ints(self.run_seed, SETUP)))
            self.plain.setup(stage)
        for name in _LOADERS[stage]:
            self._take_loaders(name)
        first = _LOADERS[stage][0]
        if not (self._training if first == "train" else self._evaluation[first].leaves):
            raise UserError(
                f"{type(self.plain).__name__} has no {first}_dataloader: add it, or leave this stage out "
                "(fit=false, test=false)"
            )
        if stage == "fit":
            self._check_training()

    def teardown(self, stage: str) -> None:
        self.plain.teardown(stage)

    def state_dict(self) -> dict[str, Any]:
        return self.plain.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.plain.load_state_dict(state_dict)

    def on_exception(self, exception: BaseException) -> None:
        self.plain.on_exception(exception)

    def train_dataloader(self) -> Any:
        """Return the loader of this rank's share of each global batch, or of each batch of several loaders."""
        self._reload("train")
        assert self._training
        loader = self._training.of_rank(self._device)
        self._training.resume(*self._resumed)
        return loader

    def resume(self, epoch: int, steps: int, states: list[Any]) -> None:
        """Let training start in an epoch after so many steps, with the `states_after` these steps."""
        self._resumed = (epoch, steps, states)
        if self._training:  # a module that counts its steps in `setup` has asked for the loader already
            self._training.resume(epoch, steps, states)

    def states_after(self, steps: int) -> list[Any]:
        """Return the state of each loader's stream after so many steps of the epoch; None if it has none."""
        return self._training.states_after(steps) if self._training else []

    def val_dataloader(self) -> Any:
        """Return this rank's loader of validation samples, a list of several, or an empty list."""
        self._reload("val")
        return self._evaluation["val"].of_rank(self._device)

    def test_dataloader(self) -> Any:
        return self._evaluation["test"].of_rank(self._device)

    def predict_dataloader(self) -> Any:
        return self._evaluation["predict"].of_rank(self._device)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> StepParts:
        """Call the hook of the DataModule, or that of the module, for each part of what a loader or several yield."""
        return combine(batch).map(self._call_hook, "on_before_batch_transfer", dataloader_idx)

    def transfer_batch_to_device(self, batch: StepParts, device: torch.device, dataloader_idx: int) -> StepParts:
        return batch.map(self._transfer, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: StepParts, dataloader_idx: int) -> Any:
        """Return what the hooks of a step get, after the hook of the DataModule, or that of the module, for each part.

        It is the batch of one part, or micro-batches joined to one. Of several virtual ranks it is the batch of the
        first, as each process of DistributedDataParallel sees the batch of its own rank.
        """
        self.parts = batch.map(self._after_transfer, dataloader_idx)
        self.use_samples_of_hooks()
        return batch_of_hooks(self.parts, self.bit_exact, self.division.is_divided)

    def use_samples_of(self, part: StepPart) -> None:
        """Let `sample_index` be that of a part of the step."""
        self._sample_index = part.sample_index

    def use_samples_of_hooks(self) -> None:
        """Let `sample_index` be that of the batch which the hooks of a step get."""
        of_parts = [part.sample_index for part in self.parts]
        self._sample_index = of_parts[0] if self.bit_exact or len(of_parts) == 1 else torch.cat(of_parts)

    def _transfer(self, part: StepPart, device: torch.device, dataloader_idx: int) -> Any:
        if isinstance(part.batch, Batch) and part.batch.image.device == device:
            return part.batch  # Lightning's own check of this is slow
        return self._call_hook(part, "transfer_batch_to_device", device, dataloader_idx)

    def _after_transfer(self, part: StepPart, dataloader_idx: int) -> Any:
        """Return what the steps of the module take.

        A module that has `takes_batch` gets a `Batch` with its weights; any other module gets what the loader yields,
        or the pair of a `Batch`.
        """
        self.use_samples_of(part)
        batch = self._call_hook(part, "on_after_batch_transfer", dataloader_idx)
        if not self._takes_batch:
            if not isinstance(batch, Batch):
                return batch
            # A prediction keeps its padding, because all ranks gather as many predictions.
            kept = batch.weight > 0 if self.trainer.evaluating else slice(None)
            return batch.image[kept], batch.target[kept]
        if isinstance(batch, Batch):
            return batch._replace(weight=self._weights(batch.weight, part.weight))
        if not isinstance(batch, list | tuple) or len(batch) != 2 or not isinstance(batch[0], Tensor):
            raise UserError(
                f"{type(self._module).__name__} takes pairs of a tensor and targets (takes_batch), but the loader "
                f"yields {type(batch).__name__}: leave takes_batch out, and let training_step compute the loss"
            )
        inputs, target = batch
        weight = self._weights(torch.ones(len(inputs), device=inputs.device), part.weight)
        return Batch(inputs, target, self.sample_index, weight)

    @property
    def sample_index(self) -> Tensor:
        """The samples of the current batch, (n,): their indices in the dataset, on the device of the module."""
        return self._sample_index.to(self.trainer.lightning_module.device, non_blocking=True)

    @property
    def parallel(self) -> DataParallelInfo:
        """The strategy's division of batches among ranks and micro-batches; without a trainer, that of one process."""
        ranks: dict[str, Any] = (self.trainer and self.trainer.distributed_sampler_kwargs) or {}
        return DataParallelInfo(
            dp_size=ranks.get("num_replicas", 1),
            dp_rank=ranks.get("rank", 0),
            num_microbatches=ranks.get("num_microbatches", 1),
            shares=tuple(ranks.get("shares") or ()) or None,
            in_turn=ranks.get("in_turn", False),
        )

    @property
    def division(self) -> Division:
        """The division of global batches into the parts of this rank."""
        has_pairs = getattr(self.plain, "has_pairs", False)
        return Division(self.parallel, self.accumulate, self.virtual_ranks, self.bit_exact, has_pairs)

    @property
    def layout(self) -> BatchLayout:
        """The positions of each global batch that this rank trains, or its first virtual rank with `bit_exact`."""
        assert self._training
        return self._training.layout

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all processes and micro-batches; of several loaders those of the first."""
        return self._training.batch_size if self._training else cast(int, self._any_loader.batch_size)

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of optimizer steps per epoch; None if a stream without a length ends it."""
        if self._training is None:  # a module asks while it makes its datasets
            self._take_loaders("train")
        return cast(TrainingLoaders, self._training).steps

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of the run: the horizon of learning-rate schedules.

        Raises:
            UserError: if the length of a stream decides it.
        """
        if self.last_step is None:
            raise UserError(
                "the training data is a stream without a length, and a schedule needs the number of steps: set "
                "trainer.max_steps or trainer.limit_train_batches"
            )
        return self.last_step

    @property
    def last_step(self) -> int | None:
        """Number of optimizer steps of the run; None if the length of a stream decides it."""
        return total_steps(self.trainer.max_epochs, self.trainer.max_steps, self.steps_per_epoch)

    def evaluates(self, name: str) -> bool:
        """Return whether `val` or `test` has samples; in the `setup` of the DataModule, whether it may have some."""
        return bool(self._evaluation[name].evaluated) if name in self._evaluation else self.limits.get(name) != 0

    @property
    def has_training_data(self) -> bool:
        """Whether the training samples are set up: not in an evaluation."""
        return self._training is not None

    @property
    def has_one_size(self) -> bool:
        """Whether each batch of training has the size of `layout`: not of several loaders, nor of a `batch_sampler`."""
        return self._training is None or self._training.has_one_size

    @property
    def description(self) -> str:
        """Some words about the data, for the banner and the loggers."""
        name = getattr(self.plain, "description", None) or type(self.plain).__name__
        if not self._training:
            return name
        counts = [source.samples for source in self._training.sources]
        return f"{name}, {' + '.join('a stream of' if count is None else f'{count:,}' for count in counts)} samples"

    def example_batch(self, count: int) -> StepParts:
        """Return a batch of `count` samples in a random order as one part, as a loader yields it."""
        return self.example_batches([(0, count)])[0]

    def example_batches(self, spans: Sequence[tuple[int, int]], evaluates: bool = False) -> list[StepParts]:
        """Return a batch as one part for each of `spans`: numbers of samples in a random order, or places in a stream.

        They are samples of training; with `evaluates`, of the first loader of the validation.
        """
        if self._training and not evaluates:
            return self._training.example_batches(spans)
        loader = self._evaluation["val"].leaves[0] if evaluates else self._any_loader
        return examples(loader, spans, self.run_seed)

    @property
    def training_samples(self) -> list[tuple[Any, int | None, str | None]]:
        """The dataset of each training loader, its number of samples, and a hash of a stream's first samples."""
        assert self._training
        return [(source.loader.dataset, source.samples, source.digest) for source in self._training.sources]

    def _set_batch_size(self) -> None:
        plain: Any = self.plain
        if getattr(plain, "batch_size", 0) is None and getattr(plain, "batch_size_per_device", None):
            processes = self.parallel.num_microbatches * self.parallel.dp_size
            plain.batch_size = plain.batch_size_per_device * self.accumulate * processes

    def _reload(self, name: str) -> None:
        """Ask the DataModule for new loaders, if it has other ones in later epochs."""
        if self.trainer and self.trainer.reload_dataloaders_every_n_epochs:
            self._take_loaders(name)

    def _take_loaders(self, name: str) -> None:
        """Ask the DataModule for loaders; a resumed run asks for those that this epoch has had.

        An evaluation has the same ones after a fit as in a process of its own.
        """
        every = self.trainer.reload_dataloaders_every_n_epochs if self.trainer.state.fn == "fit" else 0
        epoch = self.trainer.current_epoch // every * every if every else 0
        seed = int(hash_ints(self.run_seed, SETUP, epoch, *name.encode()))  # or they would make the same samples
        loaders, limit = loaders_of(self.plain, name, seed), self.limits.get(name)
        self.given[name] = tree_unflatten(loaders.leaves, loaders.structure)
        if name != "train":
            self._evaluation[name] = EvaluationLoaders(name, loaders, self.division, self.run_seed, limit)
            self._evaluation[name].check(self._takes_batch)
        elif loaders.leaves:
            self._training = TrainingLoaders(loaders, self.division, self.run_seed, limit)

    def _check_training(self) -> None:
        cast(TrainingLoaders, self._training).warn_of_rest()
        is_weighted = self._takes_batch or (self._module.automatic_optimization and self.parallel.num_microbatches == 1)
        may_be_uneven = self.layout.is_uneven or (self.division.is_divided and not self.has_one_size)
        if may_be_uneven and not is_weighted:
            raise UserError(
                f"{type(self._module).__name__} averages over the batch of its own process, but the "
                f"{self.parallel.dp_size} processes have different numbers of samples: set a data.batch_size that "
                "divides among them and no strategy.shares, let the module take a Batch and use its weights, or set "
                "bit_exact=true"
            )
        if self.steps_per_epoch == 0:
            raise UserError("trainer.limit_train_batches=0 trains nothing: set fit=false instead")

    def _weights(self, weight: Tensor, part_weight: float) -> Tensor:
        """Return the (n,) weights of samples in the loss: its sum over the ranks is a mean in training, else a sum."""
        if not self.trainer.training:
            return weight.to(self._module.dtype)
        return constant_weights(len(weight), part_weight / len(weight), self._module.dtype, weight.device)

    def _call_hook(self, part: StepPart, name: str, *args: Any) -> Any:
        """Call the DataModule's own hook, or else the module's, as Lightning would choose, with seeded generators.

        A part of a global batch must draw nothing. A `Batch` has random numbers by its samples.
        """
        is_own = is_overridden(name, self.plain, L.LightningDataModule)
        hook = getattr(self.plain if is_own else self._module, name)
        is_users = is_own or is_overridden(name, self._module, L.LightningModule)
        if isinstance(part.batch, Batch) or not is_users:  # those of Lightning draw nothing
            return hook(part.batch, *args)
        loader = args[-1]
        number = FETCHING - 1 - (loader * len(_HOOKS) + _HOOKS.index(name))  # below FETCHING: that of no step
        key = hash_ints(self.run_seed, drawing_epoch(self.trainer), int(part.sample_index[0]), number)
        seed_generators(int(key), self._module.device.type)
        with refuse_draws(name, self.division.is_divided, self._module.device.type):
            return hook(part.batch, *args)

    @property
    def _any_loader(self) -> DataLoader[Any]:
        return next(loader for loaders in self._evaluation.values() for loader in loaders.leaves)

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device  # the module may not be there yet, if it counts its steps in `setup`

    @property
    def _module(self) -> Any:
        return self.trainer.lightning_module

    @property
    def _takes_batch(self) -> bool:
        return self._module is None or getattr(self._module, "takes_batch", False)
