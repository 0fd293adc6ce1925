"""Compose and train from Python, in a notebook or a script, as train.py does from the command line."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from onecurve.config.command_line import complete_overrides, errors_explained
from onecurve.config.folder import CONF, register_resolvers, remove_if_unused
from onecurve.errors import UserError
from onecurve.process import signals
from onecurve.process.started_by import forget_other_ranks
from onecurve.run.result import Result


def compose(*overrides: str) -> DictConfig:
    """Return the configuration of `python train.py OVERRIDES`.

    It is read-only, because a run can be continued only if its overrides contain every change.
    """
    words = complete_overrides(overrides)
    with _hydra_initialized(words):
        cfg = hydra.compose("train", words)
    cfg.runtime.overrides = words
    OmegaConf.set_readonly(cfg, True)
    return cfg


def train(cfg: DictConfig) -> Result:
    """Fit, test and predict as configured by `compose`; print the banner, and write the run folder.

    Several ranks are new processes, as under train.py: a notebook needs no strategy of its own.

    Raises:
        UserError: with `doctor=true` or `plan=true`, or for what else a user can mend.
        KeyboardInterrupt: if the user interrupted the run; `ckpt_path` goes on from where it was saved.
    """
    from onecurve.launch.start import launch

    if cfg.doctor or cfg.plan:
        raise UserError("doctor=true and plan=true are for the command line: python train.py doctor=true")
    forget_other_ranks()
    with _hydra_initialized(list(cfg.runtime.overrides)), _process_restored():
        # What Hydra itself sets for a run in its folder.
        complete = hydra.compose("train", list(cfg.runtime.overrides), return_hydra_config=True)
        folder = Path(complete.hydra.run.dir).absolute()
        complete.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(complete)
        own_copy = cfg.copy()
        OmegaConf.set_readonly(own_copy, False)
        try:
            return launch(own_copy)
        except UserError:
            remove_if_unused(folder)
            raise


@contextmanager
def _hydra_initialized(words: list[str]) -> Iterator[None]:
    """Let Hydra find conf/, and turn its errors at these overrides into those of a user."""
    register_resolvers()
    with errors_explained(words), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@contextmanager
def _process_restored() -> Iterator[None]:
    """Restore what a run changes in its process: logging, warnings and the handlers of signals."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        with signals.ended_here(), warnings.catch_warnings():
            yield
    finally:
        logging.captureWarnings(False)
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.setLevel(level)
        root.handlers[:] = handlers
