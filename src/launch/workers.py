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

from src.launch.failures import RankFailedError, first_error, log_sizes
from src.launch.hosts import rendezvous_settings
from src.launch.rank import run_rank
from src.run.devices import runs_in_single_process
from src.run.resume import with_newest_checkpoint
from src.utils import signals
from src.utils.errors import UserError

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_")
_ELASTIC_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # signals that the elastic launcher takes over
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PEER_LOST = re.compile(
    "gloo|nccl|connection|socket|peer|timed out", re.IGNORECASE
)  # error messages of a rank whose peer has exited
_REPORT_DELAY = 10.0  # seconds, enough for the launcher to see which rank failed first


def launch_workers(cfg: DictConfig, processes: int, host: int = 0) -> dict[str, float]:
    """Run all ranks, restart them up to `launch.max_restarts` times after a failure; return rank zero's metrics.

    Raises:
        UserError: if the first failed rank raised one; a restart would not help.
        RankFailedError: for anything else, with that rank's error.
        SystemExit: with the conventional code, if a signal ended the job.
    """
    with signals.forward_to_workers():
        for attempt in range(cfg.launch.max_restarts + 1):
            try:
                return _run_group(cfg, processes, host, attempt)
            except RankFailedError as failed:
                left = cfg.launch.max_restarts - attempt
                if not left:
                    raise
                print(f"{failed}\nrestarting; {left - 1} restarts left after this one", file=sys.stderr)
            cfg = with_newest_checkpoint(cfg)
    raise AssertionError("the last attempt returns or raises")


def _run_group(cfg: DictConfig, processes: int, host: int, attempt: int) -> dict[str, float]:
    """Run all ranks once. (Elastic's own restarts are off: they would repeat user errors and hide their messages.)"""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_launchers()
    launcher = LaunchConfig(
        min_nodes=cfg.trainer.num_nodes,
        max_nodes=cfg.trainer.num_nodes,
        nproc_per_node=processes,
        run_id=f"{cfg.runtime.run_id}-{attempt}",
        **rendezvous_settings(cfg, host, attempt),
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=5,
        signals_to_handle=",".join(number.name for number in _ELASTIC_SIGNALS),
        logs_specs=DefaultLogsSpecs(),
    )
    handlers, sizes = {number: signal.getsignal(number) for number in _ELASTIC_SIGNALS}, log_sizes(cfg.run_dir)
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
            _delay_secondary_failure(error)
            os._exit(1)  # without the interpreter's clean-up, in which a live process group may abort
        raise


def _delay_secondary_failure(error: Exception) -> None:
    """If this rank failed only because a peer exited, wait until the launcher ends it."""
    deadline = time.monotonic() + _REPORT_DELAY
    consequence = not isinstance(error, UserError) and _PEER_LOST.search(f"{type(error).__name__} {error}")
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
