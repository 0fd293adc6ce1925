"""`doctor=true`: check this host, then start the configured ranks for an all-reduce, and print a line for each check.

The first process of each host checks the host. On several hosts under torchrun or srun, the first host prints all its
findings, and the others print their problems. The process of a host exits with code 1 if there is one.
"""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from src.doctor.clock import check_clock, check_difference
from src.doctor.data import check_data, check_run_folder
from src.doctor.finding import Check, Finding, run_check
from src.doctor.hardware import check_cores, check_devices
from src.doctor.limits import check_locked_memory, check_open_files, check_shared_memory
from src.doctor.network import check_backends, check_interfaces, check_ports
from src.doctor.report import Report
from src.doctor.slurm import check_slurm, is_srun_missing
from src.doctor.versions import check_packages, check_python
from src.doctor.wandb import check_wandb
from src.launch.external import detect_cluster_environment
from src.launch.start import launch
from src.run.folder import remove_if_unused
from src.utils.errors import UserError

CHECKS: dict[str, Check] = {
    "python": check_python,
    "packages": check_packages,
    "devices": check_devices,
    "cpu cores": check_cores,
    "shared memory": check_shared_memory,
    "locked memory": check_locked_memory,
    "open files": check_open_files,
    "clock": check_clock,
    "slurm": check_slurm,
    "backends": check_backends,
    "interfaces": check_interfaces,
    "ports": check_ports,
    "run folder": check_run_folder,
    "data": check_data,
    "wandb": check_wandb,
}


def examine(cfg: DictConfig) -> dict[str, float]:
    """Print all findings, and return the measurements of the all-reduce.

    Raises:
        UserError: if this is a sweep.
        SystemExit: with code 1, if there is a problem.
    """
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError("doctor=true checks a single run: leave out -m")
    env = detect_cluster_environment()
    rank, local_rank = (env.global_rank(), env.local_rank()) if env else (0, 0)
    report = Report(rank)
    for name, check in CHECKS.items() if local_rank == 0 else ():
        report.add(run_check(name, check, cfg))
    measured = _reduce_on_all_ranks(cfg, report)
    remove_if_unused(Path(HydraConfig.get().runtime.output_dir))
    report.close()
    return measured


def _reduce_on_all_ranks(cfg: DictConfig, report: Report) -> dict[str, float]:
    """Start the ranks, or join those that torchrun or srun started; return their measurements, if they succeed."""
    if is_srun_missing():  # this rank would wait in vain for the others
        report.add(Finding("all-reduce", False, "not started, because the job has several tasks, but no srun"))
        return {}
    _adapt_to_all_reduce(cfg)
    measured: dict[str, float] = {}

    def reduce(cfg: DictConfig) -> str:
        measured.update(launch(cfg))
        return _describe(measured)

    report.add(run_check("all-reduce", reduce, cfg))
    if measured.get("processes", 1) > 1:
        report.add(run_check("clocks", lambda _: check_difference(measured["clock_difference"]), cfg))
    return measured


def _adapt_to_all_reduce(cfg: DictConfig) -> None:
    """Turn off the options that would resume or restart a run: one may be in progress in the run folder.

    On a single host, the launcher starts a process per device, also for a strategy that has only one or starts its own.
    """
    cfg.fit, cfg.resume, cfg.launch.max_restarts = False, None, 0
    if cfg.trainer.num_nodes == 1 and not detect_cluster_environment():
        with open_dict(cfg.strategy):
            cfg.strategy.pop("single_process", None)


def _describe(measured: dict[str, float]) -> str:
    """Return the bandwidth of each process in a ring, which sends 2(N-1)/N of the bytes (`busbw` of nccl-tests)."""
    processes, size = int(measured["processes"]), measured["bytes"]
    if processes == 1:
        return "one process, which sends nothing"
    bandwidth = 2 * (processes - 1) / processes * size / measured["seconds"]
    milliseconds = 1e3 * measured["seconds"]
    return f"{processes} processes, {size / 2**20:.0f} MiB in {milliseconds:.1f} ms, {bandwidth / 1e9:.2f} GB/s"
