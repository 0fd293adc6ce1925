"""Lightning's Trainer: the configured options, and what every run needs whatever is configured."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from src.engine.config.build import NOT_PASSED, build
from src.engine.determinism.buffers import BufferCheck
from src.engine.determinism.random_functions import RandomNumbers
from src.engine.determinism.resumption import ExactResumption
from src.engine.observe.csv import CSVLogger
from src.engine.parallel.norm_groups import NormGroups
from src.engine.run.checkpoint import LastCheckpoint
from src.engine.run.description import RunDescription
from src.engine.run.loop import FiniteCheck, MonitorCheck, OptimizerSteps, patch_trainer
from src.engine.run.metric_states import MetricStates
from src.engine.run.predictions import PredictionWriter
from src.engine.run.stopping import PreemptionHandler, Watchdog
from src.engine.state.io import AtomicCheckpointIO
from src.engine.utils.errors import UserError
from src.engine.utils.overrides import as_typed

_log = logging.getLogger(__name__)
# Arguments of Lightning's Trainer that `build_trainer` gives, or that have no meaning here.
_OWN_ARGUMENTS = "strategy callbacks enable_checkpointing logger default_root_dir plugins".split()
_OWN_ARGUMENTS += ["use_distributed_sampler", "overfit_batches"]


def build_trainer(cfg: DictConfig) -> L.Trainer:
    """Build the trainer of a resolved configuration, with the callbacks and plugins that every run needs."""
    _check_options(cfg.trainer)
    folder = Path(cfg.run_dir)
    configured = _configured_callbacks(cfg)
    # Lightning accepts this plugin with every strategy, but the name 64-true only with some.
    is_double = cfg.trainer.precision == "64-true"
    strategy = OmegaConf.masked_copy(cfg.strategy, [str(key) for key in cfg.strategy if key != NOT_PASSED])
    make_trainer = build(cfg.trainer, _partial_=True)
    try:
        trainer = make_trainer(
            strategy=build(strategy),
            callbacks=_all_callbacks(cfg, configured),
            logger=CSVLogger(folder),  # RunDescription puts the configured loggers before it
            plugins=[AtomicCheckpointIO(), *([DoublePrecision()] if is_double else [])],
            precision=None if is_double else cfg.trainer.precision,
            default_root_dir=folder,
            # Without a bar among the callbacks, Lightning would add its own.
            enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in configured.values()),
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in configured.values()),
            # The option is true or false, or a number of steps; Lightning counts micro-batches.
            fast_dev_run=int(cfg.trainer.fast_dev_run) * cfg.trainer.accumulate_grad_batches,
            # OrderedData applies these limits, because Lightning would count micro-batches.
            limit_train_batches=1.0,
            limit_val_batches=1.0,
            limit_test_batches=1.0,
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
    patch_trainer(trainer)
    return trainer


def _all_callbacks(cfg: DictConfig, configured: dict[str, Any]) -> list[L.Callback]:
    """Return the callbacks that every run needs, and the configured ones."""
    folder = Path(cfg.run_dir)
    monitors = {name: getattr(callback, "monitor", None) or "" for name, callback in configured.items()}
    callbacks = [
        # These end the run: a hung rank alone, or all ranks at the same step after a signal.
        Watchdog(folder, cfg.launch.timeout),
        PreemptionHandler(folder),
        RunDescription(cfg, list(_build_each(cfg, "logger").values())),
        ExactResumption(),
        MetricStates(),  # after ExactResumption, which saves the position
        RandomNumbers(cfg.seed),
        BufferCheck(),
        OptimizerSteps(),
        MonitorCheck({name: monitor for name, monitor in monitors.items() if monitor.startswith("val")}),
        FiniteCheck(),
        *configured.values(),
    ]
    if cfg.predict:
        callbacks.append(PredictionWriter(folder))
    if cfg.trainer.sync_batchnorm:
        callbacks.append(NormGroups())  # the last one: `throughput` counts the FLOPs of a few samples, without groups
    return callbacks


def _configured_callbacks(cfg: DictConfig) -> dict[str, Any]:
    """Return the configured callbacks by name; the last of them saves the state of all others."""
    callbacks = _build_each(cfg, "callbacks")
    if not cfg.trainer.enable_progress_bar:  # Lightning refuses a bar that is disabled
        callbacks = {name: callback for name, callback in callbacks.items() if not isinstance(callback, ProgressBar)}
    return dict(sorted(callbacks.items(), key=lambda item: isinstance(item[1], LastCheckpoint)))


def _build_each(cfg: DictConfig, group: str) -> dict[str, Any]:
    """Build the configured callbacks or loggers, by name: each is one key of the group."""
    nodes = {f"{group}.{name}": node for name, node in cfg.get(group, {}).items() if node}
    for name in [name for name, node in nodes.items() if "_target_" not in node]:  # a recipe may have set its options
        options = ", ".join(map(str, nodes.pop(name)))
        _log.warning("%s has options (%s), but is left out: no file of conf/%s names its class", name, options, group)
    return {name: build(node) for name, node in nodes.items()}


def _check_options(trainer: DictConfig) -> None:
    if trainer.log_every_n_steps < 1:
        raise UserError(
            f"trainer.log_every_n_steps={trainer.log_every_n_steps} logs nothing and detects no NaN: set at least 1"
        )
    for name in _OWN_ARGUMENTS:
        if name in trainer:
            raise UserError(
                f"+trainer.{name}={as_typed(trainer[name])}: the project sets it; leave it out, and use `strategy`, "
                "`callbacks`, `logger`, run_dir or debug=overfit instead"
            )
    if not isinstance(trainer.get("val_check_interval") or 1, int | float):
        # Lightning reads each rank's own clock, so some ranks would validate while others train.
        raise UserError(
            f"trainer.val_check_interval={trainer.val_check_interval}: give a number of steps, or a fraction of an "
            "epoch; ranks cannot validate by the clock"
        )
