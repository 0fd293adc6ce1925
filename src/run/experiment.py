"""One run on one rank: build the objects that the configuration names, fit, test."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from src.callbacks.checkpoint_history import CheckpointHistory
from src.callbacks.data_position import DataPosition
from src.callbacks.heartbeat import Heartbeat
from src.callbacks.nan_guard import NaNGuard
from src.callbacks.predictions import PredictionWriter
from src.callbacks.preemption import PreemptionHandler
from src.callbacks.record import RunRecord
from src.callbacks.seed import SeedEachStep
from src.checkpoint.io import AtomicCheckpointIO
from src.checkpoint.weights import load_initial_weights
from src.loggers.csv import CSVLogger
from src.loggers.wandb import finish, preempted
from src.models.dropout import use_sample_dropout
from src.run.trainer_patches import patch_trainer
from src.strategies.compatibility import check_can_train
from src.strategies.sync_batchnorm import GlobalBatchNorm
from src.utils.errors import UserError
from src.utils.malloc import tune_malloc
from src.utils.signals import Stopped

_log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> dict[str, float]:
    """Fit, test and predict as configured; return the final metrics by name.

    Raises:
        UserError: for whatever the user can mend.
    """
    trainer, module, data = assemble(cfg)
    metrics: dict[str, Any] = {}
    succeeded = False
    try:
        if cfg.fit:
            trainer.fit(module, datamodule=data, ckpt_path=cfg.ckpt_path, weights_only=True)
            metrics |= trainer.callback_metrics
        weights: dict[str, Any] = {"ckpt_path": None if cfg.fit else cfg.ckpt_path, "weights_only": True}
        if cfg.test:
            trainer.test(module, datamodule=data, verbose=False, **weights)
            metrics |= trainer.callback_metrics
        if cfg.predict:
            trainer.predict(module, datamodule=data, return_predictions=False, **weights)
        succeeded = True
    except Stopped:
        preempted()
        raise
    except (MisconfigurationException, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith("Early stopping conditioned on metric"):
            raise
        raise _to_user_error(error) from error
    finally:
        finish(succeeded)
    results = {name: float(value) for name, value in metrics.items()}
    if trainer.is_global_zero:
        shown = (
            f"{name} {value:.4f}" for name, value in results.items() if name.startswith(("train/", "val/", "test/"))
        )
        _log.info("done: %s", "; ".join([", ".join(shown), f"everything is in {cfg.run_dir}"]).removeprefix("; "))
    return results


def assemble(cfg: DictConfig) -> tuple[L.Trainer, L.LightningModule, L.LightningDataModule]:
    """The trainer, the module with its initial weights, and the data: the same on every rank."""
    if not isinstance(cfg.seed, int) or cfg.seed < 0:
        raise UserError(f"seed={cfg.seed} is no seed: give a whole number of at least zero")
    L.seed_everything(cfg.seed, verbose=False)
    trainer = build_trainer(cfg)
    if isinstance(trainer.accelerator, CPUAccelerator):
        tune_malloc()
    # Lightning restores a checkpoint before it converts the module, which would round 64-true's weights to 32 bits.
    module: Any = trainer.precision_plugin.convert_module(build(cfg.module))
    patch_trainer(trainer, module)
    use_sample_dropout(module)
    check_can_train(trainer.strategy, module)
    if cfg.predict and not is_overridden("predict_step", module):
        raise UserError(f"predict={cfg.predict}: {type(module).__name__} classifies nothing; take another `module`")
    if cfg.init_from and not cfg.ckpt_path:
        load_initial_weights(module, cfg.init_from)
    return trainer, module, build(cfg.data)


def build(node: DictConfig, **changes: Any) -> Any:
    """The object that a configuration node describes, made of plain containers."""
    try:
        return instantiate(node, _convert_="all", **changes)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def build_trainer(cfg: DictConfig) -> L.Trainer:
    """The trainer of a resolved configuration, with what every run needs whatever is configured."""
    _check_options(cfg.trainer)
    folder, precision = Path(cfg.run_dir), cfg.trainer.precision
    together = [Heartbeat(folder, cfg.launch.timeout), PreemptionHandler(folder)]
    resuming = [RunRecord(cfg), DataPosition(), CheckpointHistory()]
    required = [*resuming, SeedEachStep(cfg.seed), NaNGuard(), PredictionWriter(folder)]
    chosen = _build_each(cfg, "callbacks")
    if not cfg.trainer.enable_progress_bar:  # Lightning raises if it is given one all the same
        chosen = [callback for callback in chosen if not isinstance(callback, ProgressBar)]
    trainer = build(cfg.trainer, _partial_=True)
    plugins: list[Any] = [AtomicCheckpointIO(), *([GlobalBatchNorm()] if cfg.trainer.sync_batchnorm else [])]
    if precision == "64-true":  # as a plugin, since by name Lightning does not let every strategy have it
        plugins, precision = [*plugins, DoublePrecision()], None
    try:
        built = trainer(
            strategy=_build_strategy(cfg.strategy),
            callbacks=[*together, *required, *chosen],
            fast_dev_run=int(cfg.trainer.fast_dev_run) * cfg.trainer.accumulate_grad_batches,  # in steps
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in chosen),
            logger=[CSVLogger(folder), *_build_each(cfg, "logger")],
            plugins=plugins,
            precision=precision,
            default_root_dir=folder,
            **dict.fromkeys(
                ("limit_train_batches", "limit_val_batches", "limit_test_batches"), 1.0
            ),  # see `data.limits`
            use_distributed_sampler=False,  # our sampler shards itself; Lightning's wrapper would shuffle it again
        )
    except (MisconfigurationException, ValueError) as error:  # what Lightning says of its arguments
        raise _to_user_error(error) from error
    return built


def _build_strategy(node: DictConfig) -> Any:
    """Build the strategy; its key `single_process` is for the launcher alone."""
    return build(OmegaConf.masked_copy(node, [str(key) for key in node if key != "single_process"]))


def _build_each(cfg: DictConfig, group: str) -> list[Any]:
    """Build the callbacks or the loggers that were chosen, each under its name in the group.

    Raises:
        UserError: if one has options, but not what they belong to.
    """
    chosen = {f"{group}.{name}": node for name, node in cfg.get(group, {}).items() if node}
    for name, node in chosen.items():
        if "_target_" not in node:
            options = ", ".join(map(str, node))
            raise UserError(f"{name} has options ({options}) but no _target_: choose a file of conf/{group} that has")
    return [build(node) for node in chosen.values()]


def _check_options(trainer: DictConfig) -> None:
    """Refuse options of Lightning's Trainer that have no meaning here.

    Raises:
        UserError: if one is given.
    """
    if trainer.log_every_n_steps < 1:
        raise UserError(
            f"trainer.log_every_n_steps={trainer.log_every_n_steps} logs nothing and finds no NaN: give at least 1"
        )
    if trainer.get("overfit_batches"):
        raise UserError(
            f"trainer.overfit_batches={trainer.overfit_batches}: take debug=overfit, which trains on one batch"
        )
    if trainer.get("enable_checkpointing") is not None:
        raise UserError(f"trainer.enable_checkpointing={trainer.enable_checkpointing}: take callbacks=none instead")
    interval = trainer.get("val_check_interval")
    if interval is not None and (not isinstance(interval, int | float) or interval <= 0):
        raise UserError(  # Lightning asks each rank's own clock, so that some would validate while others train
            f"trainer.val_check_interval={interval}: give a number of steps, or a fraction of an epoch; "
            "ranks cannot validate by the clock"
        )


def _to_user_error(error: Exception) -> UserError:
    return UserError(f"an option of `trainer`, `strategy` or `callbacks` cannot be: {' '.join(str(error).split())}")
