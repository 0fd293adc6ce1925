"""Start the ranks of a run: in this process, in new ones of this host, or in those of torchrun or SLURM.

The process that the user started composes and resolves the configuration. Each new process gets a pickled copy of it,
and ranks that torchrun or SLURM started take rank zero's. A process that starts ranks never touches a device. No
command line is rebuilt, and a job of a sweep leaves nothing behind for the next one.
"""

import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from onecurve.config.folder import typed_overrides
from onecurve.config.resolve import resolve_config, runs_in_single_process
from onecurve.errors import RankFailedError, UserError
from onecurve.launch import restarts
from onecurve.launch.external import connect_ranks, share_config
from onecurve.launch.outcome import exit_rank, first_failure, run_lifecycle
from onecurve.process import signals
from onecurve.process.devices import cores_per_rank, device_count, usable_cores
from onecurve.process.fork_server import register_end_of_interpreter, start_fork_server
from onecurve.process.groups import process_group_closed
from onecurve.process.log import REPORT_FILE, connect_debugger, log_to_folder
from onecurve.process.started_by import (
    check_tasks_are_started,
    detect_cluster_environment,
    forget_launcher,
    started_by,
    started_rank,
    take_environment,
)
from onecurve.records.events import append_event, logged_steps, read_events, stop_message
from onecurve.run.result import Result

Job = Callable[[DictConfig], Result]


def run_rank(cfg: DictConfig) -> Result:
    """Run the experiment on one rank, in this process; `Trainer.fit` opens the process group, which is closed here."""
    from onecurve.run.experiment import run_experiment  # late: it imports Lightning, which a mere launcher never uses

    log_to_folder(cfg.run_dir, started_rank())
    if device_count(cfg.trainer) > 1 and not runs_in_single_process(cfg):
        torch.set_num_threads(max(1, cores_per_rank(device_count(cfg.trainer))))
    with process_group_closed():
        return run_experiment(cfg)


def launch(cfg: DictConfig, around_workers: Callable[[DictConfig], Any] = nullcontext, job: Job = run_rank) -> Result:
    """Do a job on all ranks of a composed configuration; return the result of rank zero, or of this process's rank.

    Args:
        around_workers: context manager around the processes that this launcher starts, as those of a sweep's job; it
            gets the resolved configuration.
        job: what each rank does with the resolved configuration; `doctor=true` has one of its own.
    """
    check_tasks_are_started()
    if env := detect_cluster_environment():
        return _join_started_ranks(env, cfg, job)
    if cfg.launch.elastic is True:  # a job that was queued again may have one task
        cfg.trainer.num_nodes = int(os.environ.get("SLURM_NNODES", cfg.trainer.num_nodes))
    cfg = resolve_config(cfg)
    devices = device_count(cfg.trainer)
    if (nodes := cfg.trainer.num_nodes) > 1:
        command = shlex.join(["train.py", *typed_overrides()])
        raise UserError(
            f"trainer.num_nodes={nodes}: this command starts processes on its own host only. Give each host this "
            f"command, with the name of the first one for HOST: torchrun --nnodes={nodes} --nproc-per-node={devices} "
            f"--rdzv-backend=c10d --rdzv-endpoint=HOST:29500 {command}"
        )
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if devices == 1 and not is_sweep and not cfg.launch.max_restarts:
        with run_lifecycle(cfg):
            return job(cfg)
    with around_workers(cfg), run_lifecycle(cfg):
        return launch_workers(cfg, job)


def _join_started_ranks(env: Any, cfg: DictConfig, job: Job) -> Result:
    """Run this process as one of the ranks that torchrun or SLURM started; only rank zero prints a user error."""
    rank = env.global_rank()
    if started_by() == "torchrun":  # it leaves its ranks behind if it is killed: they save, and end
        signals.die_with_parent(os.getppid(), signal.SIGTERM)
    try:
        store = connect_ranks(env)  # it lives as long as the run, because the process group may use its server
        cfg = share_config(store, rank, env.world_size(), cfg)
    except UserError:
        if rank > 0:
            raise SystemExit(1) from None
        raise
    with os.fdopen(os.dup(2), "w") as terminal:  # above rank zero, stderr becomes the rank's log
        try:
            with run_lifecycle(cfg) if rank == 0 else nullcontext():
                return job(cfg)
        except Exception as error:
            if dist.is_initialized():
                exit_rank(error, cfg.run_dir, rank, terminal)
            raise


def launch_workers(cfg: DictConfig, job: Job = run_rank) -> Result:
    """Run all ranks, and restart them after failures (`restarts.next_start`); return rank zero's result.

    Raises:
        UserError: if the first failed rank raised one, as a restart would not help, or too few devices are left.
        RankFailedError: if the first failed rank raised another error, died, or hung.
        Stopped: if a signal ended the job.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    devices = cfg.trainer.devices
    policy = restarts.DevicePolicy([*range(devices)] if isinstance(devices, int) else [*devices], cfg)
    if cfg.launch.elastic and (reason := policy.after_probe(restarts.unusable_devices(cfg, policy.devices))):
        if read_events(cfg.run_dir):  # of a launcher that has died
            append_event(cfg.run_dir, "restart", logged_steps(cfg.run_dir), reason)
        cfg = restarts.with_devices_of(policy, cfg, reason)
    with signals.forward_to_workers():
        while True:
            processes = 1 if runs_in_single_process(cfg) else len(policy.used)
            try:
                with restarts.watch_for_devices(cfg, policy):
                    return _run_group(cfg, processes, job)
            except SignalException:  # a second signal
                raise _stopped(cfg) from None
            except (RankFailedError, signals.Stopped) as end:
                cfg = restarts.next_start(cfg, policy, end)
            if signals.requested():
                raise _stopped(cfg)


def _run_group(cfg: DictConfig, processes: int, job: Job) -> Result:
    """Run all ranks once; return the result of rank zero."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_launchers()
    # Seconds between SIGTERM and SIGKILL for the ranks that remain; torch before 2.12 always waits 30.
    options: dict[str, Any] = {"shutdown_timeout": 5} if hasattr(LaunchConfig, "shutdown_timeout") else {}
    with TemporaryDirectory(prefix="reports-", ignore_cleanup_errors=True) as reports:
        # In each rank Lightning finds by the variables of torch's elastic launcher that it has been started.
        elastic = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=cfg.runtime.run_id,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,  # because they would repeat user errors and hide their messages
            start_method=start_fork_server(),
            monitor_interval=0.1,
            signals_to_handle="",  # none: onecurve/process/signals.py handles them
            logs_specs=DefaultLogsSpecs(reports),  # the ranks write their errors into this folder
            **options,
        )
        try:
            results = elastic_launch(elastic, _run_worker)(job, cfg, {**os.environ}, usable_cores())
        except ChildFailedError as failed:
            # A signal came before the ranks could save, or a second one came.
            if signals.requested() not in (0, signals.RESIZE):
                raise _stopped(cfg) from None
            raise first_failure(failed, cfg.run_dir, Path(reports)) from None
        finally:
            os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)  # the launcher sets it, and a sweep has another run
    result_or_signal = results[0]
    if isinstance(result_or_signal, int):
        raise signals.Stopped(result_or_signal)
    return result_or_signal


def _stopped(cfg: DictConfig) -> signals.Stopped:
    """Return the exception that ends a run after a signal; print how to continue it."""
    signals.drop_lost_readers()
    print(stop_message(signals.requested(), cfg.run_dir), file=sys.stderr)
    return signals.Stopped(signals.requested())


def _run_worker(job: Job, cfg: DictConfig, environment: dict[str, str], cores: list[int]) -> Result | int:
    """Do the job of a rank in this new process; return its result, or the number of the signal that ended the run.

    It takes the environment and the cores of its launcher: a fork server has those of an earlier time.
    """
    signals.prepare_started_process()
    take_environment(environment)
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
    _silence_launchers()
    rank = int(os.environ["RANK"])
    connect_debugger(rank)
    register_end_of_interpreter()
    if runs_in_single_process(cfg):
        forget_launcher(keep=REPORT_FILE)
    try:
        return job(cfg)
    except signals.Stopped as stopped:
        return stopped.number
    except Exception as error:
        exit_rank(error, cfg.run_dir, rank)


def _silence_launchers() -> None:
    """Keep torch's tables of failures off the terminal, where they would hide the project's one line."""
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
