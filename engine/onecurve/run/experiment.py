"""One run on one rank: call the function of train.py, record its end, and build the objects for which it asks."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from onecurve.checkpoint.io import load_initial_weights
from onecurve.data.ordered_data import OrderedData
from onecurve.errors import UserError, as_typed
from onecurve.observe.wandb import wandb_ends
from onecurve.patches.lightning_loops import steps_of_loggers
from onecurve.records.events import append_event
from onecurve.run.arguments import REFUSED
from onecurve.run.ckpt_path import monitoring
from onecurve.run.predictions import PredictionWriter
from onecurve.run.recorder import numbers_in
from onecurve.run.result import Result
from onecurve.run.trainer import Trainer
from onecurve.targets import build, check_options, locate

_log = logging.getLogger(__name__)
# Arguments of the Trainer for which the configuration has another place, or that have no meaning here.
_PLACED = "strategy callbacks logger default_root_dir config seed virtual_ranks bit_exact timeout".split()
_REFUSED = [*_PLACED, "enable_checkpointing", "plugins", *REFUSED]


def run_experiment(cfg: DictConfig) -> Result:
    """Call the function `launch.function` on this rank; return the final metrics, and the trainer of the function."""
    try:
        with wandb_ends():
            trainer = locate("launch.function", cfg.launch.function)(cfg)
            if not isinstance(trainer, Trainer):
                raise UserError(
                    f"launch.function={cfg.launch.function} returns no trainer: let it end with `return trainer`"
                )
    except SystemExit as interrupted:
        if isinstance(interrupted.__context__, KeyboardInterrupt):  # Lightning replaces it (trainer/call.py)
            raise KeyboardInterrupt from None
        raise
    metrics = numbers_in(trainer.final_metrics)
    if trainer.is_global_zero:
        # `ddp_spawn` restores this count in the main process, but not `global_step`.
        append_event(cfg.run_dir, "finished", steps_of_loggers(trainer) if cfg.fit else None)
        _log_end(metrics, cfg.run_dir)
    return Result(metrics, Path(cfg.run_dir), trainer)


def assemble(cfg: DictConfig) -> tuple[Trainer, L.LightningModule, OrderedData]:
    """Build what `run` of train.py does, for plans, `doctor=true` and the dry run, without its stages."""
    trainer = build_trainer(cfg)
    return trainer, build_module(cfg, trainer), trainer.ordered_data(build(cfg.data))


def build_trainer(cfg: DictConfig) -> Trainer:
    """Build the trainer of a resolved configuration, with its strategy, callbacks and loggers.

    Raises:
        UserError: if an option of the configuration is invalid; all are checked here, before anything else is built.
    """
    check_options(cfg)
    for name in _REFUSED:
        if name in cfg.trainer:
            raise UserError(
                f"+trainer.{name}={as_typed(cfg.trainer[name])}: the project sets it; leave it out, and use "
                "`strategy`, `callbacks`, `logger`, seed, virtual_ranks, bit_exact, launch.timeout, run_dir, "
                "debug=overfit or debug=one_step instead"
            )
    callbacks = _configured_callbacks(cfg)
    make_trainer = build(cfg.trainer, _partial_=True)
    try:
        trainer = make_trainer(
            strategy=build(cfg.strategy),
            callbacks=callbacks,
            logger=list(_build_each(cfg, "logger").values()),
            default_root_dir=cfg.run_dir,
            config=cfg,
            seed=cfg.seed,
            virtual_ranks=cfg.virtual_ranks,
            bit_exact=cfg.bit_exact,
            timeout=cfg.launch.timeout,
            enable_checkpointing=False,  # by the configured callbacks alone
            # Without a bar among the callbacks, Lightning would add its own.
            enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks.values()),
        )
    except ValueError as error:
        message = " ".join(str(error).split())
        raise UserError(f"an option of `trainer`, `strategy` or `callbacks` is invalid: {message}") from error
    if cfg.fit and cfg.test == "best" and not monitoring(trainer):
        raise UserError("test=best: this run keeps no best checkpoint: add callbacks.best, or set test=true")
    return trainer


def build_module(cfg: DictConfig, trainer: Trainer) -> L.LightningModule:
    """Build the module with its initial weights, and check that strategy, precision, test and predict suit it."""
    module = build(cfg.module)
    trainer.prepare_module(module)
    for stage in ("test", "predict"):
        if cfg[stage] and not is_overridden(f"{stage}_step", module):
            raise UserError(
                f"{stage}={cfg[stage]}: {type(module).__name__} has no {stage}_step: add it, or set {stage}=false"
            )
    if cfg.init_from and not cfg.ckpt_path:
        load_initial_weights(module, cfg.init_from)
    return module


def _configured_callbacks(cfg: DictConfig) -> dict[str, Any]:
    """Return the configured callbacks by name, with the one that writes predictions."""
    callbacks = _build_each(cfg, "callbacks")
    if not cfg.trainer.enable_progress_bar:  # Lightning refuses a bar that is disabled
        callbacks = {name: callback for name, callback in callbacks.items() if not isinstance(callback, ProgressBar)}
    if cfg.predict:
        folder = Path(cfg.run_dir)
        callbacks["predictions"] = PredictionWriter(folder, of_images=cfg.predict is not True)
    return callbacks


def _build_each(cfg: DictConfig, group: str) -> dict[str, Any]:
    """Build the configured callbacks or loggers, by name: each is one key of the group."""
    nodes = {f"{group}.{name}": node for name, node in (cfg.get(group) or {}).items() if node}
    for name, node in nodes.items():
        if not isinstance(node, DictConfig):
            raise UserError(f"{name}={node}: set {group} to names of files of conf/{group}, or to null to leave it out")
    for name in [name for name, node in nodes.items() if "_target_" not in node]:  # a recipe may have set its options
        options = ", ".join(map(str, nodes.pop(name)))
        _log.warning("%s has options (%s), but is left out: no file of conf/%s names its class", name, options, group)
    return {name: build(node) for name, node in nodes.items()}


def _log_end(metrics: dict[str, float], run_dir: str) -> None:
    """Log the metrics, one line per stage, and the folder on its own line, which a terminal does not break."""
    own = [name for name in metrics if "/" not in name and name.partition("-")[0] != "lr"]  # such as val_loss
    stages = [[name for name in metrics if name.startswith(stage)] for stage in ("train/", "val/", "test/")]
    for names in filter(None, [own, *stages]):
        _log.info("%s", ", ".join(f"{name} {metrics[name]:.4f}" for name in names))
    _log.info("done: everything is in")
    _log.info("%s", run_dir)
