"""Share one configuration between processes that were started separately, after a check that all composed the same."""

import hashlib
import pickle
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import yaml
from omegaconf import DictConfig

from src.utils.errors import UserError
from src.utils.flatten import flatten_config


def sync_config(
    store: dist.Store, index: int, count: int, composed: str, resolve: Callable[[], DictConfig]
) -> DictConfig:
    """Return process 0's resolved configuration on each of `count` processes, or raise its error on all of them.

    Args:
        store: key-value store that all processes can reach.
        index: index of this process, from 0.
        count: number of processes.
        composed: this process's composed configuration as YAML, before interpolations are resolved.
        resolve: function that returns the resolved configuration; called on process 0 only.

    Raises:
        UserError: if `resolve` raised one on process 0, or the composed configurations differ.
    """
    store.set(f"hash/{index}", hashlib.sha256(composed.encode()).hexdigest())
    store.set(f"composed/{index}", composed)
    if index == 0:
        result = _config_or_error(store, count, resolve)
        store.set("result", pickle.dumps(result))  # type: ignore[arg-type]
    result = pickle.loads(store.get("result"))
    store.add("read", 1)
    # Process 0 may host the store, so it continues only when all processes have read the result.
    while index == 0 and store.add("read", 0) < count:
        time.sleep(0.05)
    if isinstance(result, UserError):
        raise result
    return result


def _config_or_error(store: dist.Store, count: int, resolve: Callable[[], DictConfig]) -> DictConfig | UserError:
    """Return the error instead of raising it, so that every process can raise it."""
    try:
        _check_equal(store, count)
        return resolve()
    except UserError as error:
        return error


def _check_equal(store: dist.Store, count: int) -> None:
    """Check that all processes composed the same configuration.

    Raises:
        UserError: if not; the message names the first option that differs.
    """
    for index in range(1, count):
        if store.get(f"hash/{index}") == store.get("hash/0"):
            continue
        first, other = _composed_by(store, 0), _composed_by(store, index)
        names = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if names:  # otherwise only the order of the options differs
            name = names[0]
            raise UserError(
                f"process {index} was started with {name}={other.get(name)}, process 0 with {name}={first.get(name)}: "
                "give every process the same command and the same files under conf/"
            )


def _composed_by(store: dist.Store, index: int) -> dict[str, Any]:
    """Return the options that a process composed, by dotted name."""
    return flatten_config(yaml.safe_load(store.get(f"composed/{index}")))
