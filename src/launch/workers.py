"""Fresh processes on this node, one per rank, by torch's elastic launcher."""

import ctypes
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig

from src.errors import UserError
from src.launch.rank import drives_all_devices, run_rank

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # those the elastic launcher takes over
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PREFIX = f"{UserError.__name__}: "
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def launch_workers(cfg: DictConfig, processes: int) -> dict[str, float]:
    """Run all ranks, and return what rank zero returns.

    Raises:
        UserError: of the first rank to fail, if that is what it raised.
        RuntimeError: with that rank's traceback, for anything else.
        SystemExit: with the conventional code, if a signal ended the job.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_launchers()
    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=cfg.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=5,
        logs_specs=DefaultLogsSpecs(),
    )
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        return elastic_launch(launcher, _worker)(cfg)[0]
    except SignalException as stopped:
        print(f"stopped by {stopped.sigval.name}; ckpt_path={cfg.run_dir} goes on from its last save", file=sys.stderr)
        raise SystemExit(128 + stopped.sigval) from None
    except ChildFailedError as failed:
        raise _first_error(failed, cfg.run_dir) from None
    finally:
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _worker(cfg: DictConfig) -> dict[str, float]:
    """The body of a fresh process."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    die_with_parent()  # no worker outlives its launcher, however that ends
    _silence_launchers()
    rank, error_file = int(os.environ["RANK"]), os.environ[_ERROR_FILE]
    if drives_all_devices(cfg):  # its own launcher must not take this process for one rank of many
        for name in [name for name in os.environ if name.startswith(_LAUNCHER_VARIABLES)]:
            del os.environ[name]
    try:
        return run_rank(cfg, rank)
    except Exception as error:
        os.environ[_ERROR_FILE] = error_file
        get_error_handler().record_exception(error)  # before the sockets close, which fails the other ranks
        if dist.is_initialized():
            logging.shutdown()
            os._exit(1)  # without the interpreter's clean-up, in which a live process group may abort
        raise


def die_with_parent() -> None:
    """Have the kernel kill this process as soon as the one that started it is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _silence_launchers() -> None:
    """Keep torch's tables of failures from hiding our line."""
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _first_error(failed: Any, run_dir: str) -> Exception:
    """The error of the rank that failed first, as the exception to raise here."""
    rank, failure = failed.get_first_failure()  # the first that was seen: others may have failed before
    reports = [_report(file) for file in Path(failure.error_file).parent.parent.glob("*/error.json")]
    if not reports or failure.exitcode < 0:  # a signal ended it; what the others report is only its absence
        return RuntimeError(f"rank {rank} died ({failure.message}); its log is {_log_file(run_dir, rank)}")
    for _, _, message, _ in sorted(reports):
        if _PREFIX in message:  # also at the end of what a process of Lightning's spawning raised
            return UserError(message.rpartition(_PREFIX)[2].strip())
    _, rank, message, trace = min(reports)
    return RuntimeError(f"rank {rank} failed ({message}); its log is {_log_file(run_dir, rank)}\n{trace}")


def _report(file: Path) -> tuple[int, int, str, str]:
    """When, on which rank, what, and the traceback."""
    report = json.loads(file.read_text())["message"]
    return file.stat().st_mtime_ns, int(file.parent.name), report["message"], report["extraInfo"]["py_callstack"]


def _log_file(run_dir: str, rank: int) -> Path:
    return Path(run_dir) / "logs" / f"rank{rank}.log"
