"""One run on one rank: build the objects that the configuration describes, fit, test and predict."""

import logging
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ProgressBar,
)
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from onecurve.determinism.dropout import use_sample_dropout
from onecurve.determinism.ordered_data import OrderedData
from onecurve.determinism.random_functions import RandomNumbers
from onecurve.determinism.resumption import ExactResumption
from onecurve.observe.csv import CSVLogger
from onecurve.observe.wandb import finish_run, mark_preempted
from onecurve.parallel.compatibility import check_callbacks, check_can_train, check_parts
from onecurve.parallel.norm_groups import NormGroups
from onecurve.run.bit_exact import BitExactness, num_threads
from onecurve.run.checkpoint import LastCheckpoint
from onecurve.run.description import RunDescription
from onecurve.run.division import DivisionCheck
from onecurve.run.metrics import MetricStates, VirtualMetrics
from onecurve.run.module_trainer import ExperimentWorld
from onecurve.run.predictions import PredictionWriter, SamplePredictions
from onecurve.run.replicas import BufferCheck, GatheredWeightCheck, ReplicaCheck
from onecurve.run.stopping import PreemptionHandler, Watchdog
from onecurve.run.training_loop import FiniteCheck, MonitorCheck, OptimizerSteps, patch_trainer
from onecurve.state.io import AtomicCheckpointIO, load_initial_weights
from onecurve.utils.errors import UserError, as_typed
from onecurve.utils.events import append_event
from onecurve.utils.process import tune_malloc
from onecurve.utils.signals import RESIZE, Stopped
from onecurve.utils.targets import NOT_PASSED, build, check_options

_log = logging.getLogger(__name__)
# Errors of the user for which Lightning has no exception of its own, by their first words, and what to say instead.
_KNOWN_ERRORS = {
    "Early stopping conditioned on metric": "",
    "It looks like your LightningModule has parameters that were not used": (
        "a backward pass gives some weights no gradient, as after toggle_optimizer, and DDP waits for it: set "
        "+strategy.find_unused_parameters=true"
    ),
    "Skipping the `training_step` by returning None": (
        "training_step returns None, and the other processes wait for its gradients: return a loss of zero, such as "
        "0 * loss, or set trainer.devices=1"
    ),
}
# Arguments of Lightning's Trainer that `build_trainer` gives, or that have no meaning here.
_OWN_ARGUMENTS = "strategy callbacks enable_checkpointing logger default_root_dir plugins".split()
_OWN_ARGUMENTS += ["use_distributed_sampler", "overfit_batches", "fast_dev_run"]


def run(cfg: DictConfig, keep_trainer: Callable[[L.Trainer], None] | None = None) -> dict[str, float]:
    """Fit, test and predict as configured; return the final metrics by name, and give `keep_trainer` the trainer."""
    trainer, module, data = assemble(cfg)
    succeeded = False
    try:
        logged = _fit_test_predict(cfg, trainer, module, data)
        succeeded = True
    except Stopped as stopped:
        if stopped.number not in (SIGINT, RESIZE):  # the user's own end, and the launcher's: no scheduler repeats them
            mark_preempted()
        raise
    except SystemExit as interrupted:
        if isinstance(interrupted.__context__, KeyboardInterrupt):  # Lightning replaces it: call.py, line 60
            raise KeyboardInterrupt from None
        raise
    except (MisconfigurationException, RuntimeError) as error:
        known = [text for start, text in _KNOWN_ERRORS.items() if str(error).startswith(start)]
        if isinstance(error, RuntimeError) and not known:
            raise
        raise UserError("".join(known) or f"Lightning refuses this run: {' '.join(str(error).split())}") from error
    finally:
        finish_run(succeeded)
    metrics = {name: float(value) for name, value in logged.items()}
    if trainer.is_global_zero:
        # `ddp_spawn` restores this count in the main process, but not `global_step`.
        steps = trainer.fit_loop.epoch_loop._batches_that_stepped
        append_event(cfg.run_dir, "finished", steps if cfg.fit else None)
        _log_end(metrics, cfg.run_dir)
    if keep_trainer:
        keep_trainer(trainer)
    return metrics


def assemble(cfg: DictConfig) -> tuple[L.Trainer, L.LightningModule, OrderedData]:
    """Build the trainer, the module with its initial weights, and the data: the same objects on every rank."""
    if not isinstance(cfg.seed, int) or cfg.seed < 0:
        raise UserError(f"seed={cfg.seed} is not a seed: give an integer of at least zero")
    if not isinstance(cfg.virtual_ranks, int) or cfg.virtual_ranks < 1:
        raise UserError(f"virtual_ranks={cfg.virtual_ranks}: give an integer of at least one")
    if not isinstance(cfg.bit_exact, bool):
        raise UserError(f"bit_exact={cfg.bit_exact}: give true or false")
    if cfg.bit_exact:
        torch.set_num_threads(num_threads())
    L.seed_everything(cfg.seed, verbose=False)
    check_options(cfg)
    trainer = build_trainer(cfg)
    if isinstance(trainer.accelerator, CPUAccelerator):
        tune_malloc()
    module = _build_module(cfg, trainer)
    if cfg.predict not in (None, False, True) and "predict_dir" not in cfg.data:
        raise UserError(
            f"predict={cfg.predict}: {cfg.data._target_} has no option predict_dir; set predict=true to predict the "
            "samples of its predict_dataloader"
        )
    limits = {name: cfg.trainer.get(f"limit_{name}_batches") for name in ("train", "val", "test")}
    accumulate = cfg.trainer.accumulate_grad_batches
    return trainer, module, OrderedData(build(cfg.data), cfg.seed, limits, accumulate, cfg.virtual_ranks, cfg.bit_exact)


def build_trainer(cfg: DictConfig) -> L.Trainer:
    """Build the trainer of a resolved configuration, with the callbacks and plugins that every run needs."""
    _check_trainer_options(cfg.trainer)
    folder = Path(cfg.run_dir)
    configured = _configured_callbacks(cfg)
    # Lightning accepts this plugin with every strategy, but the name 64-true only with some.
    is_double = cfg.trainer.precision == "64-true"
    needs_determinism = cfg.bit_exact and cfg.trainer.accelerator != "cpu"
    strategy = OmegaConf.masked_copy(cfg.strategy, [str(key) for key in cfg.strategy if key != NOT_PASSED])
    make_trainer = build(cfg.trainer, _partial_=True)
    try:
        trainer = make_trainer(
            strategy=build(strategy),
            callbacks=_all_callbacks(cfg, configured),
            logger=CSVLogger(folder),  # RunDescription puts the configured loggers before it
            plugins=[AtomicCheckpointIO(), *([DoublePrecision()] if is_double else [])],
            precision=None if is_double else cfg.trainer.precision,
            deterministic=cfg.trainer.get("deterministic") or needs_determinism or None,
            default_root_dir=folder,
            # Without a bar among the callbacks, Lightning would add its own.
            enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in configured.values()),
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in configured.values()),
            # OrderedData applies these limits, because Lightning would count micro-batches.
            limit_train_batches=1.0,
            limit_val_batches=1.0,
            limit_test_batches=1.0,
            accumulate_grad_batches=1,  # a batch of Lightning is an optimizer step: onecurve/run/parts.py
            # The project's sampler divides the data itself; Lightning's wrapper would shuffle it again.
            use_distributed_sampler=False,
            # NormGroups normalizes over groups of the global batch, also on one process.
            sync_batchnorm=False,
            # RunDescription logs the configuration, which a module's own hyper-parameters would replace in config.yaml.
            enable_autolog_hparams=False,
        )
    except (MisconfigurationException, ValueError) as error:
        message = " ".join(str(error).split())
        raise UserError(f"an option of `trainer`, `strategy` or `callbacks` is invalid: {message}") from error
    virtual = next((callback for callback in trainer.callbacks if isinstance(callback, VirtualMetrics)), None)
    patch_trainer(trainer, virtual)
    return trainer


def _check_trainer_options(trainer: DictConfig) -> None:
    if trainer.log_every_n_steps < 1:
        raise UserError(
            f"trainer.log_every_n_steps={trainer.log_every_n_steps} logs nothing and detects no NaN: set at least 1"
        )
    for name in _OWN_ARGUMENTS:
        if name in trainer:
            raise UserError(
                f"+trainer.{name}={as_typed(trainer[name])}: the project sets it; leave it out, and use `strategy`, "
                "`callbacks`, `logger`, run_dir, debug=overfit or debug=one_step instead"
            )
    if not isinstance(trainer.get("val_check_interval") or 1, int | float):
        # Lightning reads each rank's own clock, so some ranks would validate while others train.
        raise UserError(
            f"trainer.val_check_interval={trainer.val_check_interval}: give a number of steps, or a fraction of an "
            "epoch; ranks cannot validate by the clock"
        )


def _configured_callbacks(cfg: DictConfig) -> dict[str, Any]:
    """Return the configured callbacks by name; the last of them saves the state of all others."""
    callbacks = _build_each(cfg, "callbacks")
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks.values()):
        raise UserError(
            "GradientAccumulationScheduler changes the number of micro-batches while a run trains, each of which is a "
            "part of a step here: set trainer.accumulate_grad_batches, which changes no curve"
        )
    if any(isinstance(callback, BatchSizeFinder) for callback in callbacks.values()):
        raise UserError(
            "BatchSizeFinder would choose the experiment by the memory of a device: leave it out, set data.batch_size, "
            "and trainer.accumulate_grad_batches if it does not fit"
        )
    if cfg.ckpt_path:  # which has the learning rate; the search would train a continued run from its first step
        callbacks = {name: one for name, one in callbacks.items() if type(one) is not LearningRateFinder}
    if not cfg.trainer.enable_progress_bar:  # Lightning refuses a bar that is disabled
        callbacks = {name: callback for name, callback in callbacks.items() if not isinstance(callback, ProgressBar)}
    return dict(sorted(callbacks.items(), key=lambda item: isinstance(item[1], LastCheckpoint)))


def _acts_after_validation(callback: Any) -> bool:
    """Return whether EarlyStopping or ModelCheckpoint is set to act there only, whatever metric it monitors."""
    return any(getattr(callback, f"_{act}_on_train_epoch_end", None) is False for act in ("check", "save"))


def _all_callbacks(cfg: DictConfig, configured: dict[str, Any]) -> list[L.Callback]:
    """Return the callbacks that every run needs, and the configured ones."""
    folder = Path(cfg.run_dir)
    monitors = {name: callback.monitor for name, callback in configured.items() if getattr(callback, "monitor", None)}
    virtual = VirtualMetrics() if cfg.bit_exact else None
    callbacks = [
        # These end the run: a hung rank alone, or all ranks at the same step after a signal.
        Watchdog(folder, cfg.launch.timeout),
        PreemptionHandler(folder),
        ExperimentWorld(),
        RunDescription(cfg, list(_build_each(cfg, "logger").values())),
        ExactResumption(),
        *([BitExactness(), virtual] if virtual else [BufferCheck(), DivisionCheck()]),
        ReplicaCheck(),
        GatheredWeightCheck(),
        MetricStates(virtual),  # after ExactResumption, which saves the position
        RandomNumbers(cfg.seed),
        OptimizerSteps(),
        MonitorCheck(monitors, {name for name in monitors if _acts_after_validation(configured[name])}),
        FiniteCheck(),
        *configured.values(),
    ]
    if cfg.predict:
        callbacks.append(SamplePredictions(folder) if cfg.predict is True else PredictionWriter(folder))
    if cfg.trainer.sync_batchnorm and not cfg.bit_exact:
        callbacks.append(NormGroups())  # the last one: `throughput` counts the FLOPs of a few samples, without groups
    return callbacks


def _build_each(cfg: DictConfig, group: str) -> dict[str, Any]:
    """Build the configured callbacks or loggers, by name: each is one key of the group."""
    nodes = {f"{group}.{name}": node for name, node in (cfg.get(group) or {}).items() if node}
    for name in [name for name, node in nodes.items() if "_target_" not in node]:  # a recipe may have set its options
        options = ", ".join(map(str, nodes.pop(name)))
        _log.warning("%s has options (%s), but is left out: no file of conf/%s names its class", name, options, group)
    return {name: build(node) for name, node in nodes.items()}


def _build_module(cfg: DictConfig, trainer: L.Trainer) -> L.LightningModule:
    """Build the module with its initial weights, and check that the strategy and the configured stages suit it."""
    module: Any = build(cfg.module)
    if any(part.__module__.startswith("pytorch_lightning") for part in type(module).__mro__):
        raise UserError(f"{type(module).__name__} is of pytorch_lightning, another package: import lightning as pl")
    # Lightning restores a checkpoint before it converts the module, which would round 64-true's weights to 32 bits.
    module = trainer.precision_plugin.convert_module(module)
    use_sample_dropout(module)
    check_parts(trainer, module, cfg)
    check_can_train(trainer.strategy, module)
    check_callbacks(trainer)
    for stage in ("test", "predict"):
        if cfg[stage] and not is_overridden(f"{stage}_step", module):
            raise UserError(f"{stage}={cfg[stage]}: {type(module).__name__} has no {stage}_step: add it")
    if cfg.init_from and not cfg.ckpt_path:
        load_initial_weights(module, cfg.init_from)
    return module


def _fit_test_predict(
    cfg: DictConfig, trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule
) -> dict[str, Any]:
    """Run the configured stages; return the last value of each metric that training and test logged."""
    if cfg.test not in (True, False, "best"):
        raise UserError(f"test={cfg.test}: give true, false or best")
    keeps_best = any(getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks)
    if cfg.fit and cfg.test == "best" and not keeps_best:
        raise UserError("test=best: this run keeps no best checkpoint: add callbacks.best, or set test=true")
    metrics: dict[str, Any] = {}
    if cfg.fit:
        trainer.fit(module, datamodule=data, ckpt_path=cfg.ckpt_path, weights_only=True)
        metrics |= trainer.callback_metrics
    ckpt_path = _checkpoint_to_test(cfg, trainer)
    if cfg.test:
        trainer.test(module, datamodule=data, verbose=False, ckpt_path=ckpt_path, weights_only=True)
        metrics |= trainer.callback_metrics
    if cfg.predict:
        trainer.predict(module, datamodule=data, return_predictions=False, ckpt_path=ckpt_path, weights_only=True)
    return metrics


def _checkpoint_to_test(cfg: DictConfig, trainer: L.Trainer) -> str | None:
    """Return the checkpoint to test and to predict with; None for the weights that the module has after training."""
    if not cfg.fit:
        return cfg.ckpt_path
    if cfg.test != "best":
        return None
    callbacks: list[Any] = [one for one in trainer.checkpoint_callbacks if getattr(one, "monitor", None)]
    if not callbacks[0].best_model_path:
        raise UserError("test=best: training has kept no best checkpoint (callbacks.best): set test=true")
    path = trainer.strategy.broadcast(callbacks[0].best_model_path)
    if dist.is_initialized() and not trainer.strategy.reduce_boolean_decision(path == callbacks[0].best_model_path):
        _log.warning(
            "test=best: %s differs between the ranks, and rank zero's is taken: log it with sync_dist=True",
            callbacks[0].monitor,
        )
    _log.info("test=best: %s", path)
    return path


def _log_end(metrics: dict[str, float], run_dir: str) -> None:
    """Log the metrics, one line per stage, and the folder on its own line, which a terminal does not break."""
    for stage in ("train/", "val/", "test/"):
        if measured := [f"{name} {value:.4f}" for name, value in metrics.items() if name.startswith(stage)]:
            _log.info("%s", ", ".join(measured))
    _log.info("done: everything is in")
    _log.info("%s", run_dir)
