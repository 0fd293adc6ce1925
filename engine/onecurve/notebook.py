"""Compose and train from Python, in a notebook or a script, as train.py does from the command line."""

import csv
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from onecurve.config.command_line import complete_overrides, errors_explained
from onecurve.config.folder import CONF, register_resolvers, remove_if_unused
from onecurve.errors import UserError
from onecurve.process import signals
from onecurve.process.started_by import forget_other_ranks
from onecurve.records.files import METRICS

if TYPE_CHECKING:
    import lightning as L

_COLUMN_TYPES = {"step": int, "epoch": int}  # of metrics.csv; all others are float


@dataclass(frozen=True)
class Result:
    """The outcome of `train`.

    Attributes:
        metrics: last value of each metric, by name.
        folder: the run folder, from which `load_run` reads the network.
        trainer: Lightning's trainer, with its `lightning_module` and `datamodule`; None if the ranks were other
            processes.
    """

    metrics: dict[str, float]
    folder: Path
    trainer: "L.Trainer | None" = None

    @property
    def history(self) -> list[dict[str, float]]:
        """The rows of metrics.csv, each without its empty cells; `pandas.DataFrame` takes them."""
        file = self.folder / METRICS
        with file.open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        return [{name: _COLUMN_TYPES.get(name, float)(cell) for name, cell in row.items() if cell} for row in rows]


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
        KeyboardInterrupt: if the user interrupted the run; `ckpt_path` goes on from where it was saved.
    """
    from onecurve.launch.start import launch

    forget_other_ranks()
    trainers: list[L.Trainer] = []
    with _hydra_initialized(list(cfg.runtime.overrides)), _process_restored():
        # What Hydra itself sets for a run in its folder.
        complete = hydra.compose("train", list(cfg.runtime.overrides), return_hydra_config=True)
        folder = Path(complete.hydra.run.dir).absolute()
        complete.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(complete)
        own_copy = cfg.copy()
        OmegaConf.set_readonly(own_copy, False)
        try:
            metrics = launch(own_copy, keep_trainer=trainers.append)
        except UserError:
            remove_if_unused(folder)
            raise
    return Result(metrics, Path(trainers[0].default_root_dir), trainers[0]) if trainers else Result(metrics, folder)


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
