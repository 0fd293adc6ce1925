"""One configuration for processes that were started apart: the first one's, once all are found to have the same."""

import hashlib
import pickle
import time
from collections.abc import Callable

import torch.distributed as dist
import yaml
from omegaconf import DictConfig

from src.run.resolve import leaves
from src.utils.errors import UserError


def agree(store: dist.Store, number: int, count: int, composed: str, prepare: Callable[[], DictConfig]) -> DictConfig:
    """The configuration of number zero, for each of `count` processes; if it is at fault, each learns so.

    Args:
        store: where they meet.
        number: of this process.
        count: of processes.
        composed: the configuration that this one was started with, as YAML, nothing of it resolved.
        prepare: gives the resolved one; called in number zero.

    Raises:
        UserError: what number zero found wrong, or that they were started with different configurations.
    """
    store.set(f"hash/{number}", hashlib.sha256(composed.encode()).hexdigest())
    store.set(f"composed/{number}", composed)
    if number == 0:
        store.set("outcome", pickle.dumps(_outcome(store, count, prepare)))  # type: ignore[arg-type]
    outcome = pickle.loads(store.get("outcome"))
    store.add("read", 1)
    while number == 0 and store.add("read", 0) < count:  # it may be this process that holds the store
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
            ours, theirs = (leaves(yaml.safe_load(store.get(f"composed/{which}"))) for which in (0, number))
            name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            raise UserError(
                f"process {number} was started with {name}={theirs.get(name)}, process 0 with {name}={ours.get(name)}: "
                "give every process the same command and the same files under conf/"
            )
