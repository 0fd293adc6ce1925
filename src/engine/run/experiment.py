"""One run on one rank: build the objects that the configuration describes, fit, test and predict."""

import logging
from collections.abc import Callable
from signal import SIGINT
from typing import Any

import lightning as L
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from src.engine.config.build import build, check_options
from src.engine.determinism.dropout import use_sample_dropout
from src.engine.determinism.ordered_data import OrderedData
from src.engine.observe.wandb import finish_run, mark_preempted
from src.engine.parallel.compatibility import check_can_train
from src.engine.run.trainer import build_trainer
from src.engine.state.weights import load_initial_weights
from src.engine.utils.errors import UserError
from src.engine.utils.events import append_event
from src.engine.utils.process import tune_malloc
from src.engine.utils.signals import Stopped

_log = logging.getLogger(__name__)
# An error of the user for which Lightning has no exception of its own (`EarlyStopping._validate_condition_metric`).
_UNKNOWN_METRIC = "Early stopping conditioned on metric"


def run(cfg: DictConfig, keep_trainer: Callable[[L.Trainer], None] | None = None) -> dict[str, float]:
    """Fit, test and predict as configured; return the final metrics by name, and give `keep_trainer` the trainer."""
    trainer, module, data = assemble(cfg)
    succeeded = False
    try:
        logged = _fit_test_predict(cfg, trainer, module, data)
        succeeded = True
    except Stopped as stopped:
        if stopped.number != SIGINT:  # the user's own end of the run, which no scheduler should repeat
            mark_preempted()
        raise
    except SystemExit as interrupted:
        if isinstance(interrupted.__context__, KeyboardInterrupt):  # Lightning replaces it: call.py, line 60
            raise KeyboardInterrupt from None
        raise
    except (MisconfigurationException, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith(_UNKNOWN_METRIC):
            raise
        raise UserError(f"Lightning refuses this run: {' '.join(str(error).split())}") from error
    finally:
        finish_run(succeeded)
    metrics = {name: float(value) for name, value in logged.items()}
    if trainer.is_global_zero:
        if not trainer.fast_dev_run:
            # `ddp_spawn` restores this count in the main process, but not `global_step`.
            steps = trainer.fit_loop.epoch_loop._batches_that_stepped
            append_event(cfg.run_dir, "finished", steps if cfg.fit else None)
        _log_end(metrics, cfg.run_dir)
    if keep_trainer:
        keep_trainer(trainer)
    return metrics


def _fit_test_predict(
    cfg: DictConfig, trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule
) -> dict[str, Any]:
    """Run the configured stages; return the last value of each metric that training and test logged."""
    if cfg.test not in (True, False, "best"):
        raise UserError(f"test={cfg.test}: give true, false or best")
    keeps_best = any(getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks)
    if cfg.fit and cfg.test == "best" and not (keeps_best or trainer.fast_dev_run):
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
    if cfg.test != "best" or trainer.fast_dev_run:  # which saves nothing
        return None
    callbacks: list[Any] = [one for one in trainer.checkpoint_callbacks if getattr(one, "monitor", None)]
    if not callbacks or not callbacks[0].best_model_path:
        raise UserError("test=best: training has kept no best checkpoint (callbacks.best): set test=true")
    _log.info("test=best: %s", callbacks[0].best_model_path)
    return callbacks[0].best_model_path


def _log_end(metrics: dict[str, float], run_dir: str) -> None:
    """Log the metrics, one line per stage, and the folder on its own line, which a terminal does not break."""
    for stage in ("train/", "val/", "test/"):
        if measured := [f"{name} {value:.4f}" for name, value in metrics.items() if name.startswith(stage)]:
            _log.info("%s", ", ".join(measured))
    _log.info("done: everything is in")
    _log.info("%s", run_dir)


def assemble(cfg: DictConfig) -> tuple[L.Trainer, L.LightningModule, OrderedData]:
    """Build the trainer, the module with its initial weights, and the data: the same objects on every rank."""
    if not isinstance(cfg.seed, int) or cfg.seed < 0:
        raise UserError(f"seed={cfg.seed} is not a seed: give an integer of at least zero")
    L.seed_everything(cfg.seed, verbose=False)
    check_options(cfg)
    trainer = build_trainer(cfg)
    if isinstance(trainer.accelerator, CPUAccelerator):
        tune_malloc()
    module = _build_module(cfg, trainer)
    if cfg.predict and "predict_dir" not in cfg.data:
        raise UserError(f"predict={cfg.predict}: {cfg.data._target_} has no option predict_dir; choose another `data`")
    limits = {name: cfg.trainer.get(f"limit_{name}_batches") for name in ("train", "val", "test")}
    return trainer, module, OrderedData(build(cfg.data), cfg.seed, limits)


def _build_module(cfg: DictConfig, trainer: L.Trainer) -> L.LightningModule:
    """Build the module with its initial weights, and check that the strategy and the configured stages suit it."""
    # Lightning restores a checkpoint before it converts the module, which would round 64-true's weights to 32 bits.
    module: Any = trainer.precision_plugin.convert_module(build(cfg.module))
    use_sample_dropout(module)
    check_can_train(trainer.strategy, module)
    for stage in ("test", "predict"):
        if cfg[stage] and not is_overridden(f"{stage}_step", module):
            raise UserError(f"{stage}={cfg[stage]}: {type(module).__name__} has no {stage}_step: add it")
    if cfg.init_from and not cfg.ckpt_path:
        load_initial_weights(module, cfg.init_from)
    return module
