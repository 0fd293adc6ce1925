"""`onecurve.Trainer`: Lightning's Trainer, whose runs have the same learning curve on any hardware."""

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec, cast
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from onecurve.checkpoint.begun_epoch import BegunEpoch
from onecurve.checkpoint.io import AtomicCheckpointIO
from onecurve.checkpoint.resumption import ExactResumption
from onecurve.checks.divergence import FiniteCheck
from onecurve.checks.loss import LossCheck
from onecurve.checks.replicas import BufferCheck, GatheredWeightCheck, ReplicaCheck
from onecurve.checks.schedules import ScheduleCheck
from onecurve.checks.unsaved_state import UnsavedStateCheck
from onecurve.data.module_data import GivenLoaders, ModuleData
from onecurve.data.ordered_data import OrderedData
from onecurve.errors import CheckpointUserError, UserError
from onecurve.network.precision import is_double
from onecurve.observe.csv import CSVLogger
from onecurve.parallel.compatibility import check_callbacks, check_can_divide_steps, check_can_train, resolve_strategy
from onecurve.parallel.norm_groups import NormGroups
from onecurve.patches.lightning_loops import leave_signals_alone, replace_parts
from onecurve.process.devices import resolve_devices, tune_malloc
from onecurve.process.log import log_script, shorten_user_errors
from onecurve.random.dropout import use_sample_dropout
from onecurve.random.hashing import hash_ints
from onecurve.random.seeding import AFTER_STAGE, seed_generators
from onecurve.random.step_seeds import RandomNumbers
from onecurve.records.files import CHECKPOINTS
from onecurve.run import arguments
from onecurve.run.attributes import Attributes
from onecurve.run.bit_exact import BitExactness
from onecurve.run.ckpt_path import check_overwrites_nothing, find_checkpoint, monitoring
from onecurve.run.known_errors import translated_errors
from onecurve.run.late_saves import LateSaves
from onecurve.run.logged_values import LoggedValues, LogPointConnector
from onecurve.run.loop_changes import LoopChanges, PreparingConnector
from onecurve.run.metric_states import MetricStates, MetricSync, VirtualMetrics
from onecurve.run.recorder import RunRecorder
from onecurve.run.saving import LastCheckpoint
from onecurve.run.script import describe_script, rename_config_of_cli, stage_of_script
from onecurve.run.step import StepInParts
from onecurve.run.stopping import PreemptionHandler, Watchdog

_log = logging.getLogger(__name__)
_USERS_SEED = "PL_GLOBAL_SEED"  # the variable in which `lightning.seed_everything` keeps its seed
_FOLDER = "onecurve_logs"  # of a run without `default_root_dir`, beside Lightning's lightning_logs
_Arguments = ParamSpec("_Arguments")
_stages = count()  # of all trainers of the process


def _typed_as(method: Callable[_Arguments, Any]) -> Callable[[Any], Callable[_Arguments, Any]]:
    """Return a decorator that gives a method the signature and the help of another."""
    return cast(Any, wraps(method))


class Trainer(L.Trainer):
    """A `lightning.Trainer` whose runs have the same learning curve on any hardware, also stopped and continued.

    It takes the arguments of `lightning.Trainer` and those below. It fits plain LightningModules with DataModules or
    loaders, in the order of samples that `seed` and the epoch determine. Build the module after the trainer, because
    the trainer seeds the generators from which its weights are drawn.

    `metrics.csv`, `config.yaml`, `events.jsonl`, `checkpoints/` with `last.ckpt`, and in `logs/` the stacks of a rank
    that hung go to `default_root_dir`.

    Args:
        strategy: `auto`, `ddp`, `ddp_spawn`, `dp`, `fsdp`, `pipeline`, or a strategy of onecurve or Lightning.
        seed: determines initial weights, the order of the samples, and random numbers; None for that of
            `lightning.seed_everything`, if it was called before, or 0.
        virtual_ranks: the run is that of so many ranks, whatever the hardware that executes them; batch normalization
            takes its statistics over the samples of each. None for 4 with `bit_exact`, and otherwise for 1, the whole
            batch.
        bit_exact: compute the virtual ranks one by one, which is equal to the last bit on any hardware, and works for
            code that depends on the samples of a batch together.
        sync_batchnorm: batch normalization takes its statistics over the samples of each virtual rank, on any hardware;
            otherwise over what a process has in memory.
        accumulate_grad_batches: micro-batches of a step. A step has the samples of one batch of the loader.
        timeout: seconds; a rank that takes no step for so long counts as hung, and is ended.
        callbacks: a list of callbacks, or a dictionary of them, whose keys name them in errors.
        logger: loggers besides metrics.csv.
        default_root_dir: the folder of the run; None for `onecurve_logs`.
        config: the resolved configuration of the run, if there is one.
        **kwargs: further arguments of `lightning.Trainer`.

    Attributes:
        final_metrics: the last value of each metric that was logged, as tensors by name.

    Raises:
        UserError: if an argument is invalid, or has no meaning here.
    """

    def __init__(
        self,
        *,
        strategy: Any = "auto",
        accelerator: str = "auto",
        devices: Any = "auto",
        seed: int | None = None,
        virtual_ranks: int | None = None,
        bit_exact: bool = False,
        sync_batchnorm: bool = True,
        accumulate_grad_batches: int = 1,
        timeout: float = 1800,
        callbacks: L.Callback | Iterable[L.Callback] | Mapping[str, L.Callback] | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        default_root_dir: str | Path | None = None,
        config: DictConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self._is_script = config is None
        if self._is_script:
            log_script(rank_zero_only.rank)
            shorten_user_errors(self, rank_zero_only.rank)
        self.seed = int(os.environ.get(_USERS_SEED) or 0) if seed is None else seed
        self.virtual_ranks = (4 if bit_exact else 1) if virtual_ranks is None else virtual_ranks
        arguments.check_arguments(self.seed, self.virtual_ranks, bit_exact, kwargs)
        arguments.check_is_local("default_root_dir", default_root_dir)
        self.bit_exact, self.accumulate, self.sync_batchnorm = bit_exact, accumulate_grad_batches, sync_batchnorm
        # OrderedData applies these limits, because Lightning would count micro-batches.
        self.limits = {name: kwargs.pop(f"limit_{name}_batches", None) for name in ("train", "val", "test", "predict")}
        self.final_metrics: dict[str, Any] = {}
        self._data: OrderedData | None = None  # of the last stage
        self._fitted: L.LightningDataModule | None = None  # the user's data of the last fit
        self.given_arguments = {"timeout": timeout, **kwargs}
        self._folder = Path(default_root_dir or _FOLDER).expanduser()
        with mock.patch.dict(os.environ):  # or a later trainer would take this seed for the user's
            L.seed_everything(self.seed, verbose=False)
        # Of torch's generator, for a warning; not if the user has seeded it too.
        self.state_before_module = None if os.environ.get(_USERS_SEED) else torch.get_rng_state()
        accelerator, devices = resolve_devices(accelerator, devices)
        kwargs["deterministic"] = kwargs.get("deterministic") or (bit_exact and accelerator != "cpu") or None
        if bit_exact:  # cuDNN would choose its kernels by their times, in each process again
            kwargs["benchmark"] = False
        plugins: list[Any] = [AtomicCheckpointIO(), *arguments.as_list(kwargs.pop("plugins", None))]
        if is_double(kwargs.get("precision")):  # Lightning accepts its names with some strategies only
            kwargs["precision"] = None
            plugins.append(DoublePrecision())
        given = self._with_last_checkpoint(arguments.named(callbacks), kwargs.pop("enable_checkpointing", None))
        arguments.check_callbacks_are_possible(given)
        # Callbacks that begin a step or each part of it: run/step.py.
        self.random_numbers = RandomNumbers(self.seed)
        self.virtual_metrics = VirtualMetrics() if bit_exact else None
        self.buffer_check = BufferCheck()
        loggers = arguments.as_list(None if isinstance(logger, bool) else logger)
        self._recorder = RunRecorder(config, loggers)
        # Lightning gets neither accumulate_grad_batches nor sync_batchnorm: its batch is a step, whose parts and groups
        # OrderedData and NormGroups make.
        with translated_errors(None):
            super().__init__(
                strategy=resolve_strategy(strategy, devices, kwargs.get("num_nodes", 1)),
                accelerator=accelerator,
                devices=devices,
                callbacks=self._all_callbacks(given, timeout),
                logger=[*loggers, CSVLogger(self._folder)],
                plugins=plugins,
                default_root_dir=self._folder,
                enable_checkpointing=arguments.has_kind(given, Checkpoint),
                # OrderedData divides the data itself; Lightning's wrapper would shuffle it again.
                use_distributed_sampler=False,
                # RunRecorder logs the configuration, which the module's hyper-parameters would replace in config.yaml.
                enable_autolog_hparams=False,
                **kwargs,
            )
        leave_signals_alone(self)
        replace_parts(self, StepInParts, partial(LoggedValues, self), PreparingConnector, LogPointConnector)
        if accelerator == "cpu":
            tune_malloc()

    def _with_last_checkpoint(self, given: dict[str, L.Callback], is_wanted: bool | None) -> dict[str, L.Callback]:
        """Return the given callbacks, with one that saves the last state."""
        folder = str(self._folder / CHECKPOINTS)
        if is_wanted is not False and not arguments.has_kind(given, LastCheckpoint):
            given["checkpoint"] = LastCheckpoint(folder)
        for one in given.values():
            if isinstance(one, ModelCheckpoint) and one.dirpath is None:
                one.dirpath = folder
        return given

    def _all_callbacks(self, given: dict[str, L.Callback], timeout: float) -> list[L.Callback]:
        """Return the callbacks of every run around those given, in the order of their hooks.

        Lightning moves those that tune before all others, and those that save checkpoints behind them.
        """
        normalize = [NormGroups()] if self.sync_batchnorm and not self.bit_exact else []
        return [
            BegunEpoch(),  # before a signal may save, at the first step
            LateSaves(),  # before other callbacks begin the next step
            Watchdog(self._folder, timeout),  # ends a hung rank alone
            PreemptionHandler(self._folder),  # ends all ranks at the same step after a signal
            self._recorder,
            ExactResumption(),  # before MetricStates and LoopChanges, which read the position that it saves
            Attributes(),
            *([BitExactness(), self.virtual_metrics] if self.virtual_metrics else [self.buffer_check, LossCheck()]),
            ReplicaCheck(),
            GatheredWeightCheck(),
            MetricSync(),
            MetricStates(),
            UnsavedStateCheck(),
            self.random_numbers,
            LoopChanges(),
            ScheduleCheck(given),
            FiniteCheck(),
            *given.values(),
            *normalize,  # last: `throughput` counts the FLOPs of a few samples, without groups
        ]

    def fit(
        self,
        model: L.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = True,
    ) -> None:
        """Fit the module, from the beginning or from a checkpoint.

        `ckpt_path` is a file, a run folder, `best`, or `last`: the last one in the folder of this run, if there is one.

        Raises:
            UserError: if the folder holds a run, which this one does not continue.
        """
        arguments.check_precision(self.given_arguments.get("precision"), self.accelerator)
        loaders = {"train": train_dataloaders, "val": val_dataloaders}
        path = find_checkpoint(self, ckpt_path, weights_only is not False)
        if path:  # which has the learning rate; the search would train a continued run from its first step
            callbacks = cast(Any, self).callbacks
            self.callbacks = [one for one in callbacks if type(one) is not LearningRateFinder]
        else:
            arguments.check_search(self)
        if self._is_script and ckpt_path not in ("last", "best"):
            check_overwrites_nothing(self, path)
        data = self._prepare("fit", model, loaders, datamodule, path)
        self._fitted = data.plain
        with self._stage("fit", path):
            super().fit(model, datamodule=data, ckpt_path=path, weights_only=weights_only)

    @_typed_as(L.Trainer.validate)
    def validate(self, *args: Any, **options: Any) -> Any:
        return self._evaluate("validate", "val", *args, **options)

    @_typed_as(L.Trainer.test)
    def test(self, *args: Any, **options: Any) -> Any:
        return self._evaluate("test", "test", *args, **options)

    @_typed_as(L.Trainer.predict)
    def predict(self, *args: Any, **options: Any) -> Any:
        return self._evaluate("predict", "predict", *args, **options)

    def _evaluate(self, stage: str, name: str, *args: Any, **options: Any) -> Any:
        """Run a stage of Lightning: without a module and a checkpoint with the best one, if a callback keeps it."""
        run = getattr(super(), stage)
        given = inspect.signature(run).bind(*args, **options).arguments
        module, ckpt_path = given.pop("model", None), given.pop("ckpt_path", None)
        loaders, datamodule = {name: given.pop("dataloaders", None)}, given.pop("datamodule", None)
        if module is None and ckpt_path is None and any(one.best_model_path for one in monitoring(self)):
            ckpt_path = "best"
        module = module or self.lightning_module
        if module is None:
            raise UserError(f"{stage}() has no module: give it one, or fit one before")
        path = find_checkpoint(self, ckpt_path, given.get("weights_only") is not False)
        if ckpt_path and not path:
            raise CheckpointUserError(f"{stage}(ckpt_path='last'): {self._folder} has no checkpoint: fit first")
        data = self._prepare(stage, module, loaders, datamodule, path)
        if path and not self._is_script:  # which shows Lightning's own lines
            _log.info("%s: the weights of %s", stage, path)
        with self._stage(stage, path):
            return run(module, datamodule=data, ckpt_path=path, **given)

    # Lightning's properties would be the loaders of a rank's parts.

    @property
    def train_dataloader(self) -> Any:
        """The loader of training, or a collection of several, as the user has made it, with all samples."""
        return self._given_loaders("train", super().train_dataloader)

    @property
    def val_dataloaders(self) -> Any:
        return self._given_loaders("val", super().val_dataloaders)

    @property
    def test_dataloaders(self) -> Any:
        return self._given_loaders("test", super().test_dataloaders)

    @property
    def predict_dataloaders(self) -> Any:
        return self._given_loaders("predict", super().predict_dataloaders)

    def _given_loaders(self, name: str, of_rank: Any) -> Any:
        return of_rank if of_rank is None or self._data is None else self._data.given[name]

    @property
    def enable_validation(self) -> bool:
        """Whether an epoch has a validation, before which Lightning resets the gradients: not without samples."""
        return super().enable_validation and (self._data is None or self._data.evaluates("val"))

    @contextmanager
    def _stage(self, name: str, path: str | None) -> Iterator[None]:
        """Return a context for a stage from a checkpoint; after it a script draws other numbers each time."""
        of_script = stage_of_script(self, name, path) if self._is_script else nullcontext()
        try:
            with of_script, translated_errors(path), self._recorder.waiting_loggers_hidden(self):
                yield
            self.final_metrics |= self.callback_metrics
        finally:
            if self.virtual_metrics:  # Lightning calls no `teardown` after an error
                self.virtual_metrics.teardown()
            key = int(hash_ints(self.seed, AFTER_STAGE, next(_stages)))
            seed_generators(key, self.strategy.root_device.type)

    def ordered_data(self, plain: L.LightningDataModule) -> OrderedData:
        """Return the data of a run, in its order: the same object as long as the DataModule is the same."""
        if isinstance(plain, OrderedData):
            return plain
        if self._data is None or self._data.plain is not plain:
            self._data = OrderedData(plain, self.seed, self.limits, self.accumulate, self.virtual_ranks, self.bit_exact)
        return self._data

    def prepare_module(self, module: L.LightningModule) -> None:
        """Convert the module to the precision of the run, and check that the strategy suits it.

        Lightning restores a checkpoint before it converts the module, which would round the weights of 64-true.
        """
        if any(part.__module__.startswith("pytorch_lightning") for part in type(module).__mro__):
            raise UserError(
                f"{type(module).__name__} is of pytorch_lightning, another package: import lightning as pl; if a "
                'library imports it, set sys.modules["pytorch_lightning"] = lightning.pytorch before you import that'
            )
        self.precision_plugin.convert_module(module)
        use_sample_dropout(module)
        check_can_divide_steps(self, module)
        check_can_train(self.strategy, module)
        check_callbacks(self)
        arguments.check_callbacks_are_possible(arguments.named(module.configure_callbacks()))

    def _prepare(
        self,
        stage: str,
        module: L.LightningModule,
        loaders: dict[str, Any],
        datamodule: L.LightningDataModule | None,
        ckpt_path: str | None,
    ) -> OrderedData:
        """Prepare the module, describe a run without a configuration, and return the data in its order."""
        given = [one for one in loaders.values() if one is not None]
        plain = datamodule
        if plain is None and any(isinstance(one, L.LightningDataModule) for one in given):  # in the place of a loader
            plain = given.pop(0)
        if plain is not None and given:
            raise UserError(f"{stage}() has both loaders and a DataModule: give one of them")
        if plain is None and given:
            plain = GivenLoaders(loaders)
        if plain is None:
            plain = self._fitted if self._fitted is not None and stage != "fit" else ModuleData()
        data = self.ordered_data(plain)
        self.prepare_module(module)
        if self._is_script:
            rename_config_of_cli(self, stage)
            self._recorder.config = describe_script(self, module, data.plain, stage, ckpt_path)
        return data


# The arguments of this class, with those that it hands on: a configuration is checked by them, and editors show them.
_parameters = {**inspect.signature(L.Trainer).parameters, **inspect.signature(Trainer).parameters}
_named = [one.replace(kind=one.KEYWORD_ONLY) for name, one in _parameters.items() if name != "kwargs"]
cast(Any, Trainer).__signature__ = inspect.Signature(_named)
