"""How the processes of a run come to be: here, in fresh workers of torch's elastic launcher, or they exist already.

The configuration is composed once, in the process the user started, which never touches a device; every rank gets
that very object. No command line is rebuilt, and a job leaves nothing behind for the next one of a sweep.
"""

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig

from src.errors import UserError
from src.launch.config import device_count, prepare
from src.launch.logs import log_to_folder
from src.launch.ranks import agree, external

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # those the elastic launcher takes over
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # those the elastic launcher takes over
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def launch(cfg: DictConfig) -> dict[str, float]:
    """Run the job on all its ranks; return rank zero's final metrics.

    Raises:
        UserError: what the first rank to fail found wrong; it has already ended the others.
    """
    if env := external():
        cfg = agree(env, lambda: prepare(cfg))
        return _run_rank(cfg, env.global_rank(), env.local_rank())
    cfg = prepare(cfg)
    processes = 1 if _single_process(cfg) else device_count(cfg.trainer)
    world_size = device_count(cfg.trainer) * cfg.trainer.num_nodes
    if world_size > 1 and not dist.is_available():
        raise UserError(
            f"trainer.devices={cfg.trainer.devices} needs torch.distributed, which this build of torch lacks: "
            "install one that has it, or set trainer.devices=1"
        )
    if cfg.trainer.num_nodes > 1:
        raise UserError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}: this command starts processes on one node only; "
            "start train.py by torchrun or srun on all of them"
        )
    if world_size == 1 and HydraConfig.get().mode == RunMode.RUN:
        return _run_rank(cfg, rank=0, local_rank=0)
    return _launch_workers(cfg, processes)


def _single_process(cfg: DictConfig) -> bool:
    """Whether the strategy drives all of a node's devices from one process."""
    return getattr(get_object(cfg.strategy._target_), "single_process", False)


def _launch_workers(cfg: DictConfig, processes: int) -> dict[str, float]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # their tables would hide our line
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
        raise SystemExit(128 + stopped.sigval) from None
    except ChildFailedError as failed:
        raise _first_error(failed, cfg.run_dir) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _worker(cfg: DictConfig) -> dict[str, float]:
    """The body of a fresh process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no worker outlives its launcher, however that ends
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if _single_process(cfg):  # its own launcher must not take this process for one rank of many
        for name in [name for name in os.environ if name.startswith(_LAUNCHER_VARIABLES)]:
            del os.environ[name]
    return _run_rank(cfg, rank, local_rank)


def _run_rank(cfg: DictConfig, rank: int, local_rank: int) -> dict[str, float]:
    """Train and test in this process, which is one rank, or the only one."""
    from src.experiment import run

    log_to_folder(cfg.run_dir, rank)
    if cfg.trainer.accelerator == "cpu" and (sharers := device_count(cfg.trainer)) > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // sharers))
    try:
        return run(cfg)
    finally:
        _destroy_group(failed=sys.exc_info()[0] is not None)


def _destroy_group(failed: bool) -> None:
    """A gloo process that exits with its group alive may abort.

    NCCL's destruction may wait for a rank that has failed: there, the end of the process does it.
    """
    if dist.is_available() and dist.is_initialized() and not (failed and dist.get_backend() == "nccl"):
        dist.destroy_process_group()


def _first_error(failed: Any, run_dir: str) -> Exception:
    """The error of the rank that failed first, as the exception to raise here."""
    rank, failure = failed.get_first_failure()
    report = failure.error_file_data["message"]  # a rank that was killed left none, only its exit code
    message, trace = failure.message, ""
    if isinstance(report, dict):
        message, trace = report["message"], report["extraInfo"]["py_callstack"]
    prefix = f"{UserError.__name__}: "
    if message.startswith(prefix):
        return UserError(message.removeprefix(prefix))
    log = Path(run_dir) / "logs" / f"rank{rank}.log"
    return RuntimeError(f"rank {rank} failed ({message}); its log is {log}\n{trace}")
