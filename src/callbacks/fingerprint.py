"""The fingerprint of an experiment: two runs with one fingerprint have one curve, on any hardware."""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from src.utils.code_version import code_version
from src.utils.errors import UserError
from src.utils.option_kinds import CONTINUABLE, default_value, experiment_options, matches
from src.utils.quoting import as_typed
from src.utils.targets import target_names

_log = logging.getLogger(__name__)
_DIGITS = 6


@dataclass(frozen=True)
class Experiment:
    """What a run computes, as plain values that a checkpoint keeps.

    Attributes:
        options: the options of the experiment by name; `data.batch_size` is the size of the global batch.
        data: the number of training images, and hashes of their indices and labels.
        code: a hash of the source code of the classes that the options name.
    """

    options: dict[str, Any]
    data: dict[str, Any]
    code: str

    @property
    def fingerprint(self) -> str:
        """Six hexadecimal digits. Versions of libraries have no part in it, so that a change of their numbers shows."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, default=str).encode()).hexdigest()[:_DIGITS]


def describe_experiment(config: DictConfig, data: Any) -> Experiment:
    """Return the experiment of a resolved configuration and a data module that is set up; equal on all ranks."""
    options = experiment_options(config) | {"data.batch_size": data.global_batch_size}
    targets = [value for name, value in options.items() if name.endswith("_target_")]
    split = data.splits["train"]
    facts = {
        "training images": len(split),
        "training indices (SHA-256)": _hash(split.indices),
        "training labels (SHA-256)": _hash(split.dataset.labels),
    }
    return Experiment(options, facts, code_version([*targets, *target_names(list(options.values()))]))


def continue_experiment(saved: dict[str, Any] | None, current: Experiment, config: DictConfig) -> Experiment:
    """Return the experiment of a run that continues the one of a checkpoint; log if it is another one.

    Args:
        saved: the experiment in the checkpoint as a dictionary; None in one of an earlier version.
        current: the experiment of the configuration.
        config: the resolved configuration.

    Raises:
        UserError: if options differ that a continued run cannot change, or the training data.
    """
    if saved is None:
        _log.warning("ckpt_path is of an earlier version, which kept no experiment: its options are not compared")
        return current
    before = Experiment(**saved)
    # The weights come from the checkpoint, and so the initial weights stay those of the earlier run.
    initial = {name: value for name, value in before.options.items() if name == "init_from"}
    kept = {name: value for name, value in current.options.items() if name != "init_from"}
    now = replace(current, options=kept | initial)
    options = _different(before.options, now.options)
    if fixed := [name for name in options if not matches(name, CONTINUABLE)]:
        _refuse(_changes(fixed, before.options, now.options, config))
    if facts := _different(before.data, now.data):
        _refuse(_changes(facts, before.data, now.data, config))
    if before.fingerprint != now.fingerprint:
        log = _log.info if options else _log.warning
        reason = _changes(options, before.options, now.options, config) or "the code of its classes was edited"
        log("the run goes on as experiment %s, before %s: %s", now.fingerprint, before.fingerprint, reason)
    return now


def _different(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _changes(names: list[str], before: dict[str, Any], now: dict[str, Any], config: DictConfig) -> str:
    """Return the names with both values; an absent option has its default."""
    values = [[as_typed(part.get(name, default_value(config, name))) for part in (before, now)] for name in names]
    return ", ".join(f"{name}={old} (now {new})" for name, (old, new) in zip(names, values, strict=True))


def _refuse(changes: str) -> None:
    raise UserError(f"the run in ckpt_path had {changes}: that is another experiment; set it back, or start a new run")


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()[:16]
