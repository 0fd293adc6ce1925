"""Compose and train from Python, in a notebook or a script, as train.py does from the command line."""

import csv
import logging
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from src.engine.config.folder import CONF, register_resolvers, remove_if_unused
from src.engine.config.main import errors_explained
from src.engine.config.shorthands import complete_overrides
from src.engine.utils import signals
from src.engine.utils.errors import UserError

if TYPE_CHECKING:
    import lightning as L

_COLUMN_TYPES = {"step": int, "epoch": int}  # of metrics.csv; all others are float


@dataclass(frozen=True)
class Result:
    """The outcome of `train`.

    Attributes:
        metrics: last value of each metric, by name.
        folder: the run folder, from which `load_run` reads the network.
        trainer: Lightning's trainer with the trained module and its data; None if the ranks were other processes.
    """

    metrics: dict[str, float]
    folder: Path
    trainer: "L.Trainer | None" = None

    @property
    def module(self) -> "L.LightningModule | None":
        """The trained module, or None if the ranks were other processes."""
        return self.trainer.lightning_module if self.trainer else None

    @property
    def data(self) -> "L.LightningDataModule | None":
        """The data module with its splits, or None if the ranks were other processes."""
        return getattr(self.trainer, "datamodule", None)

    @property
    def history(self) -> list[dict[str, float]]:
        """The rows of metrics.csv, each without its empty cells; `pandas.DataFrame` takes them."""
        file = self.folder / "metrics.csv"
        with file.open(newline="") as stream:
            rows = [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(stream)]
        return [{name: _COLUMN_TYPES.get(name, float)(cell) for name, cell in row.items()} for row in rows]


def compose(*overrides: str) -> DictConfig:
    """Return the configuration of `python train.py OVERRIDES`.

    It is read-only, because a run can be continued only if its overrides contain every change.

    Raises:
        UserError: if an override is invalid.
    """
    words = complete_overrides(overrides)
    if flags := [word for word in words if word.startswith("-")]:
        raise UserError(f"{flags[0]} is for the command line: give overrides; for a sweep, call train in a loop")
    with _hydra_initialized(words):
        cfg = hydra.compose("train", words)
    cfg.runtime.overrides = words
    OmegaConf.set_readonly(cfg, True)
    return cfg


def train(cfg: DictConfig) -> Result:
    """Fit, test and predict as configured by `compose`; print the banner, and write the run folder.

    Several ranks are new processes, as under train.py: a notebook needs no strategy of its own.

    Raises:
        UserError: if an option is invalid, or training fails for a reason that the user can fix.
        RankFailedError: if a rank of several failed for another reason.
        KeyboardInterrupt: if the user interrupted the run; `ckpt_path` goes on from where it was saved.
    """
    from src.engine.launch.start import launch

    trainers: list[L.Trainer] = []
    with _hydra_initialized(list(cfg.runtime.overrides)), _process_restored():
        folder = _make_run_folder(cfg)
        own_copy = cfg.copy()
        OmegaConf.set_readonly(own_copy, False)
        try:
            metrics = launch(own_copy, _main_not_imported, keep_trainer=trainers.append)
        except UserError:
            remove_if_unused(folder)
            raise
    if not trainers:
        return Result(metrics, folder)
    return Result(metrics, Path(trainers[0].default_root_dir), trainers[0])


def _make_run_folder(cfg: DictConfig) -> Path:
    """Make the run folder, and set what Hydra itself would set for a run in it."""
    complete = hydra.compose("train", list(cfg.runtime.overrides), return_hydra_config=True)
    folder = Path(complete.hydra.run.dir).absolute()
    complete.hydra.runtime.output_dir = str(folder)
    HydraConfig.instance().set_config(complete)
    return folder


@contextmanager
def _hydra_initialized(words: list[str]) -> Iterator[None]:
    """Let Hydra find conf/, and turn its errors at these overrides into those of a user."""
    register_resolvers()
    with errors_explained(words), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@contextmanager
def _process_restored() -> Iterator[None]:
    """Restore what a run changes in its process: logging, warnings and the handlers of signals."""
    signal_handlers: dict[int, Any] = {number: signal.getsignal(number) for number in signals.SIGNALS}
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        with warnings.catch_warnings():
            yield
    except SystemExit as error:
        # A run turns an interrupt into an exit, after it has saved, and so does Lightning before a run can save.
        if error.code != 128 + signal.SIGINT and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        raise KeyboardInterrupt from None
    finally:
        signals.forget_requests()  # also one that came after the last step, which would stop the next run
        signals.restore_handlers(signal_handlers)
        logging.captureWarnings(False)
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.setLevel(level)
        root.handlers[:] = handlers


@contextmanager
def _main_not_imported(cfg: DictConfig) -> Iterator[None]:
    """Keep the ranks from importing the caller's file, which would train there again.

    A spawned process imports the main module if it has a name or a file, which for a program from the standard input is
    "<stdin>" (`get_preparation_data` in multiprocessing/spawn.py).
    """
    main = vars(sys.modules["__main__"])
    hidden: dict[str, Any] = {name: main.pop(name) for name in ("__spec__", "__file__") if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(hidden)
