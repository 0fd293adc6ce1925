"""Share one configuration between processes that were started separately, after checking that all have the same."""

import hashlib
import pickle
import time
from collections.abc import Callable

import torch.distributed as dist
import yaml
from omegaconf import DictConfig

from src.utils.errors import UserError
from src.utils.flatten import flatten_config


def sync_config(
    store: dist.Store, index: int, count: int, composed: str, prepare: Callable[[], DictConfig]
) -> DictConfig:
    """Return process 0's resolved configuration on each of `count` processes, or raise its error on all of them.

    Args:
        store: key-value store that all processes can reach.
        index: index of this process, from 0.
        count: index of processes.
        composed: this process's composed configuration as YAML, before interpolations are resolved.
        prepare: function that returns the resolved configuration; called on process 0 only.

    Raises:
        UserError: what process 0 found wrong, or that the configurations differ.
    """
    store.set(f"hash/{index}", hashlib.sha256(composed.encode()).hexdigest())
    store.set(f"composed/{index}", composed)
    if index == 0:
        store.set("outcome", pickle.dumps(_outcome(store, count, prepare)))  # type: ignore[arg-type]
    outcome = pickle.loads(store.get("outcome"))
    store.add("read", 1)
    while index == 0 and store.add("read", 0) < count:  # it may be this process that holds the store
        time.sleep(0.05)
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


def _outcome(store: dist.Store, count: int, prepare: Callable[[], DictConfig]) -> DictConfig | UserError:
    try:
        _check_same(store, count)
        return prepare()
    except UserError as error:
        return error


def _check_same(store: dist.Store, count: int) -> None:
    for number in range(1, count):
        if store.get(f"hash/{number}") != store.get("hash/0"):
            ours, theirs = (flatten_config(yaml.safe_load(store.get(f"composed/{which}"))) for which in (0, number))
            name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            raise UserError(
                f"process {number} was started with {name}={theirs.get(name)}, process 0 with {name}={ours.get(name)}: "
                "give every process the same command and the same files under conf/"
            )
