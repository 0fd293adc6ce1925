"""The run of a script: its log and record, and its description, in the form of a configuration, by its objects."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import callbacks
from omegaconf import DictConfig, ListConfig, OmegaConf

from onecurve.patches.lightning_loops import steps_of_loggers
from onecurve.process.signals import ended_here
from onecurve.records.events import append_event, failure_recorded
from onecurve.records.files import CONFIG
from onecurve.targets import default_options, plain_config

_log = logging.getLogger(__name__)
_PLAIN = (bool, int, float, str, type(None))
_NOT_PLAIN = object()
_NOT_COMPOSED: dict[str, Any] = {"overrides": [], "changes": [], "revision": None, "modified": False, "strategy": None}
# Callbacks that change what is trained, or for how long; others observe.
_TRAINING = (
    *(callbacks.EarlyStopping, callbacks.LearningRateFinder, callbacks.BaseFinetuning, callbacks.ModelPruning),
    *(callbacks.StochasticWeightAveraging, callbacks.WeightAveraging),
)


@contextmanager
def stage_of_script(trainer: Any, name: str, path: str | None) -> Iterator[None]:
    """Return a context for a stage that begins from the checkpoint `path`; in a notebook a signal ends the stage only.

    Rank zero records how a fit ends, as the launcher of train.py does.
    """
    if name == "fit" and not path:
        _warn_of_early_module(trainer)
    is_recorded, folder = name == "fit" and trainer.is_global_zero, trainer.default_root_dir
    recorded = failure_recorded(folder) if is_recorded else nullcontext()
    with recorded, ended_here() if hasattr(sys, "ps1") else nullcontext():
        yield
    if is_recorded:
        append_event(folder, "finished", steps_of_loggers(trainer))


def _warn_of_early_module(trainer: Any) -> None:
    """Warn if nothing was drawn since the trainer has seeded the generators: the weights may be from before."""
    before, trainer.state_before_module = trainer.state_before_module, None
    if before is not None and torch.equal(before, torch.get_rng_state()):
        _log.warning(
            "no random number was drawn since the trainer has seeded the generators: if the module was built before "
            "it, build it after it, or call lightning.seed_everything first, so that each run begins with the same "
            "weights"
        )


def rename_config_of_cli(trainer: Any, stage: str) -> None:
    """Let LightningCLI save its configuration in `cli_fit.yaml`, for instance: `config.yaml` is that of the run.

    A continued run replaces it, where Lightning would refuse to start.
    """
    for callback in trainer.callbacks:
        if getattr(callback, "config_filename", None) == CONFIG:  # SaveConfigCallback, whose import takes 0.2 s
            callback.config_filename, callback.overwrite = f"cli_{stage}.yaml", True


def describe_script(
    trainer: Any, module: L.LightningModule, data: L.LightningDataModule, stage: str, path: str | None
) -> DictConfig:
    """Return the configuration that names the experiment of a script's run.

    Its options are the arguments of the trainer, and the hyper-parameters that module and DataModule have kept by
    `save_hyperparameters`. Other arguments of these are not compared when a run continues. `path` is the checkpoint.
    """
    given = trainer.given_arguments | {f"limit_{name}_batches": limit for name, limit in trainer.limits.items()}
    given |= {"devices": trainer.num_devices, "accumulate_grad_batches": trainer.accumulate}
    given |= {"sync_batchnorm": trainer.sync_batchnorm}
    return OmegaConf.create(
        {
            "seed": trainer.seed,
            "virtual_ranks": trainer.virtual_ranks,
            "bit_exact": trainer.bit_exact,
            "trainer": {"_target_": "onecurve.Trainer", **_plain(given)},
            "module": _describe(module),
            "data": _describe(data),
            "strategy": _describe_options(trainer.strategy),
            "callbacks": {
                type(one).__name__: _describe_options(one) for one in trainer.callbacks if isinstance(one, _TRAINING)
            },
            "launch": {"timeout": given["timeout"], "elastic": False},
            "fit": stage == "fit" or trainer.fit_loop.epoch_progress.current.ready > 0,
            "test": stage == "test",
            "ckpt_path": path,
            "run_dir": str(trainer.default_root_dir),
            "runtime": {"command": list(sys.argv), **_NOT_COMPOSED},
        }
    )


def _describe(part: Any) -> dict[str, Any]:
    """Return the class of a module or DataModule with its saved hyper-parameters."""
    return _plain(dict(part.hparams)) | _target(part)


def _describe_options(part: Any) -> dict[str, Any]:
    """Return the class of a strategy or callback with the options that it keeps."""
    target = _target(part)
    is_hardware = type(part).__module__.startswith("lightning.pytorch.strategies.")
    options = default_options(target["_target_"]) if target and not is_hardware else []
    return _plain({option: getattr(part, option, _NOT_PLAIN) for option in options}) | target


def _target(part: Any) -> dict[str, str]:
    """Return the name of a class; none of a class in a function."""
    name = _name_of(type(part))
    return {} if "<locals>" in name else {"_target_": name}


def _name_of(kind: type | FunctionType) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".replace("__mp_main__", "__main__")


def _plain(value: Any) -> Any:
    """Return what YAML can hold of a value: numbers, texts, flags, and lists and dictionaries of them.

    A class with arguments, as Hydra gives an optimizer with `_partial_: true`, is its name with these.
    """
    if isinstance(value, partial) and isinstance(value.func, type | FunctionType):
        value = {**value.keywords, "_partial_": _name_of(value.func)}
    if isinstance(value, ListConfig):  # a DictConfig may be a whole configuration, with the paths of this run
        value = plain_config(value)
    if isinstance(value, dict):
        plain = {str(name): _plain(item) for name, item in value.items()}
        return {name: item for name, item in plain.items() if item is not _NOT_PLAIN}
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else items
    value = value.item() if isinstance(value, np.generic) else value
    return value if type(value) in _PLAIN else _NOT_PLAIN
