"""The variables of a SLURM job, against the configuration."""

import os
import re

from omegaconf import DictConfig

from src.doctor.hardware import processes_per_host
from src.run.devices import runs_in_single_process
from src.utils.errors import UserError


def is_srun_missing() -> bool:
    """Return whether a job of several tasks started this process without srun, so that the other ranks never come."""
    return _number("SLURM_NTASKS") > 1 and not {"SLURM_STEP_ID", "TORCHELASTIC_RUN_ID"} & os.environ.keys()


def check_slurm(cfg: DictConfig) -> str:
    """Check nodes, tasks, cores and GPUs of the job; the message names the option of sbatch to change."""
    if "SLURM_JOB_ID" not in os.environ:
        return "not in a SLURM job"
    if problems := _problems(cfg):
        raise UserError("; ".join(problems))
    return f"job {os.environ['SLURM_JOB_ID']}, {_number('SLURM_NTASKS') or 1} task(s)"


def _problems(cfg: DictConfig) -> list[str]:
    nodes, devices = cfg.trainer.num_nodes, processes_per_host(cfg)
    job_nodes, job_gpus = _number("SLURM_NNODES") or nodes, _number("SLURM_GPUS_ON_NODE") or devices
    # One task, or torchrun, starts all processes of its host; otherwise each task is one of the ranks.
    is_rank = _number("SLURM_NTASKS") > 1 and "TORCHELASTIC_RUN_ID" not in os.environ
    tasks, needed_tasks = _number("SLURM_NTASKS"), 1 if runs_in_single_process(cfg) else devices
    cores = _number("SLURM_CPUS_PER_TASK") or len(os.sched_getaffinity(0))
    needed_cores = (1 if is_rank else devices) * (1 + cfg.data.num_workers)
    rules = [
        (is_srun_missing(), "the job has several tasks, but no srun: start `srun python train.py ...`"),
        (job_nodes != nodes, f"the job has {job_nodes} nodes, but trainer.num_nodes={nodes}: set --nodes={nodes}"),
        (
            is_rank and tasks != needed_tasks * nodes,
            f"the job has {tasks} tasks, but trainer.devices={devices} x trainer.num_nodes={nodes}: "
            f"set --ntasks-per-node={needed_tasks}",
        ),
        (
            cores < needed_cores,
            f"a task has {cores} core(s) for {needed_cores} processes, with those of data.num_workers: "
            f"set --cpus-per-task={needed_cores}",
        ),
        (
            job_gpus < devices and cfg.trainer.accelerator != "cpu",
            f"the job has {job_gpus} GPU(s) per node, but trainer.devices={devices}: set --gpus-per-node={devices}",
        ),
    ]
    return [message for is_wrong, message in rules if is_wrong]


def _number(variable: str) -> int:
    """Return the number with which the value of a variable starts, or 0."""
    found = re.match(r"\d+", os.environ.get(variable, ""))
    return int(found[0]) if found else 0
