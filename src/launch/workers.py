"""Fresh processes on this node, one per rank, by torch's elastic launcher."""

import ctypes
import logging
import os
import re
import signal
import sys
import time
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig

from src.launch.failures import RankFailed, first_error, log_sizes
from src.launch.hosts import rendezvous_settings
from src.launch.rank import run_rank
from src.run.resolve import runs_in_single_process
from src.run.resume import continued
from src.utils import signals
from src.utils.errors import UserError

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_")
_ELASTICS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # signals that the elastic launcher takes over
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LOST = re.compile("gloo|nccl|connection|socket|peer|timed out", re.IGNORECASE)  # of a rank whose peer is gone
_PATIENCE = 10.0  # seconds in which the launcher surely sees who went first


def launch_workers(cfg: DictConfig, processes: int, host: int = 0) -> dict[str, float]:
    """Run all ranks, up to `launch.max_restarts` times once more, and return what rank zero returns.

    Raises:
        UserError: of the first rank to fail, if that is what it raised: no restart would help.
        RankFailed: for anything else, with that rank's error.
        SystemExit: with the conventional code, if a signal ended the job.
    """
    with signals.passed_on():
        for attempt in range(cfg.launch.max_restarts + 1):
            try:
                return _run_group(cfg, processes, host, attempt)
            except RankFailed as failed:
                left = cfg.launch.max_restarts - attempt
                if not left:
                    raise
                print(f"{failed}\nstarting again; restarts left after this: {left - 1}", file=sys.stderr)
            cfg = continued(cfg)
    raise AssertionError("the last attempt returns or raises")


def _run_group(cfg: DictConfig, processes: int, host: int, attempt: int) -> dict[str, float]:
    """Run all ranks once. (Elastic's own restarts would repeat also what the user has to mend, and tell nothing.)"""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_launchers()
    launcher = LaunchConfig(
        min_nodes=cfg.trainer.num_nodes,
        max_nodes=cfg.trainer.num_nodes,
        nproc_per_node=processes,
        run_id=f"{cfg.run_id}-{attempt}",
        **rendezvous_settings(cfg, host, attempt),
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=5,
        signals_to_handle=",".join(number.name for number in _ELASTICS),
        logs_specs=DefaultLogsSpecs(),
    )
    handlers, sizes = {number: signal.getsignal(number) for number in _ELASTICS}, log_sizes(cfg.run_dir)
    try:
        (outcome, *_) = elastic_launch(launcher, _worker)(cfg, os.getpid()).values()
    except SignalException as stopped:
        raise _stopped(cfg, signals.requested() or stopped.sigval) from None
    except ChildFailedError as failed:
        if number := signals.requested():  # it came before they could save, or was sent once more
            raise _stopped(cfg, number) from None
        raise first_error(failed, cfg.run_dir, sizes) from None
    finally:
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if isinstance(outcome, int):
        raise signals.Stopped(outcome)
    return outcome


def _stopped(cfg: DictConfig, number: int) -> SystemExit:
    name = signal.Signals(number).name
    print(f"stopped by {name}; ckpt_path={cfg.run_dir} goes on from its last save", file=sys.stderr)
    return signals.Stopped(number)


def _worker(cfg: DictConfig, launcher: int) -> Any:
    """The body of a fresh process: it returns the metrics, or the number of the signal that ended the run."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    die_with_parent(launcher)
    _silence_launchers()
    rank, error_file = int(os.environ["RANK"]), os.environ[_ERROR_FILE]
    if runs_in_single_process(cfg):  # its own launcher must not take this process for one rank of many
        for name in [name for name in os.environ if name.startswith(_LAUNCHER_VARIABLES)]:
            del os.environ[name]
    try:
        return run_rank(cfg, rank)
    except signals.Stopped as stopped:
        return stopped.number
    except Exception as error:
        os.environ[_ERROR_FILE] = error_file
        get_error_handler().record_exception(error)  # before the sockets close, which fails the other ranks
        if dist.is_initialized():
            logging.shutdown()
            _let_the_first_go_first(error)
            os._exit(1)  # without the interpreter's clean-up, in which a live process group may abort
        raise


def _let_the_first_go_first(error: Exception) -> None:
    """If this rank only lost another, wait until the launcher, which sees who ended first, ends this one too."""
    deadline = time.monotonic() + _PATIENCE
    consequence = not isinstance(error, UserError) and _LOST.search(f"{type(error).__name__} {error}")
    while consequence and not signals.requested() and time.monotonic() < deadline:
        time.sleep(0.05)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent is gone, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # which it did before that call
        os._exit(1)


def _silence_launchers() -> None:
    """Keep torch's tables of failures from hiding our line."""
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
