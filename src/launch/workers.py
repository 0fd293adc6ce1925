"""Run all ranks of this node in new processes, with torch's elastic launcher."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig

from src.checkpoint.run_files import stop_message
from src.launch.failures import RankFailedError, first_error, log_sizes
from src.launch.hosts import rendezvous_settings
from src.launch.outcome import record_restart
from src.launch.rank import run_rank
from src.launch.rank_exit import ERROR_FILE, exit_worker
from src.run.devices import runs_in_single_process
from src.run.resume import with_newest_checkpoint
from src.utils import signals

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_")
_ELASTIC_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)  # signals that the elastic launcher handles


def launch_workers(cfg: DictConfig, processes: int, node_rank: int = 0) -> dict[str, float]:
    """Run all ranks, restart them up to `launch.max_restarts` times after a failure; return rank zero's metrics.

    Raises:
        UserError: if the first failed rank raised one; a restart would not help.
        RankFailedError: if the first failed rank raised another error, died, or hung.
        Stopped: if a signal ended the job.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    with signals.forward_to_workers():
        for attempt in range(cfg.launch.max_restarts + 1):
            try:
                return _run_group(cfg, processes, node_rank, attempt)
            except SignalException as stopped:
                raise _stopped(cfg, signals.requested() or stopped.sigval) from None
            except RankFailedError as failed:
                if attempt == cfg.launch.max_restarts:
                    raise
                restarts_left = cfg.launch.max_restarts - attempt - 1
                print(f"{failed}\nrestarting; {restarts_left} restarts left after this one", file=sys.stderr)
                if node_rank == 0:
                    record_restart(cfg.run_dir, failed)
            cfg = with_newest_checkpoint(cfg)
    raise AssertionError("the last attempt returns or raises")


def _run_group(cfg: DictConfig, processes: int, node_rank: int, attempt: int) -> dict[str, float]:
    """Run all ranks once; return the metrics of this node's first rank."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _silence_launchers()
    elastic_config = _elastic_config(cfg, processes, node_rank, attempt)
    sizes = log_sizes(cfg.run_dir)
    with _elastic_signals_restored():
        try:
            results = elastic_launch(elastic_config, _run_worker)(cfg, os.getpid())
        except ChildFailedError as failed:
            if number := signals.requested():  # a signal came before the ranks could save, or a second one came
                raise _stopped(cfg, number) from None
            raise first_error(failed, cfg.run_dir, sizes) from None
    metrics_or_signal = next(iter(results.values()))
    if isinstance(metrics_or_signal, int):
        raise signals.Stopped(metrics_or_signal)
    return metrics_or_signal


def _elastic_config(cfg: DictConfig, processes: int, node_rank: int, attempt: int) -> Any:
    """Return the settings of torch's elastic launcher.

    Its own restarts are off, because they would repeat user errors and hide their messages.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    # Seconds between SIGTERM and SIGKILL for the ranks that remain; torch before 2.12 always waits 30.
    options: dict[str, Any] = {"shutdown_timeout": 5} if hasattr(LaunchConfig, "shutdown_timeout") else {}
    return LaunchConfig(
        min_nodes=cfg.trainer.num_nodes,
        max_nodes=cfg.trainer.num_nodes,
        nproc_per_node=processes,
        run_id=f"{cfg.runtime.run_id}-{attempt}",
        **rendezvous_settings(cfg, node_rank, attempt),
        max_restarts=0,
        monitor_interval=0.1,
        **options,
        signals_to_handle=",".join(number.name for number in _ELASTIC_SIGNALS),
        logs_specs=DefaultLogsSpecs(),
    )


@contextmanager
def _elastic_signals_restored() -> Iterator[None]:
    """Restore the signal handlers that the elastic launcher replaces, and remove its environment variable."""
    handlers = {number: signal.getsignal(number) for number in _ELASTIC_SIGNALS}
    try:
        yield
    finally:
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _stopped(cfg: DictConfig, number: int) -> signals.Stopped:
    """Print how to continue the run, and return the exception that ends it."""
    print(stop_message(number, cfg.run_dir), file=sys.stderr)
    return signals.Stopped(number)


def _run_worker(cfg: DictConfig, launcher: int) -> dict[str, float] | int:
    """Run one rank in this new process; return its metrics, or the number of the signal that ended the run.

    Args:
        cfg: the resolved configuration.
        launcher: process id of the launcher.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    signals.prepare_started_process(launcher)
    _silence_launchers()
    rank, error_file = int(os.environ["RANK"]), os.environ[ERROR_FILE]
    if runs_in_single_process(cfg):
        _remove_launcher_variables()
    try:
        return run_rank(cfg, rank)
    except signals.Stopped as stopped:
        return stopped.number
    except Exception as error:
        os.environ[ERROR_FILE] = error_file  # which `_remove_launcher_variables` removes
        # The report must exist before the sockets close, because their end fails the other ranks.
        get_error_handler().record_exception(error)
        if dist.is_initialized():
            exit_worker(error)
        raise


def _remove_launcher_variables() -> None:
    """Keep the strategy's own launcher from taking this single process for one rank of many."""
    for name in list(os.environ):
        if name.startswith(_LAUNCHER_VARIABLES):
            del os.environ[name]


def _silence_launchers() -> None:
    """Keep torch's tables of failures off the terminal, where they would hide the project's one line."""
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
