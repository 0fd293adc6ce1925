"""Which rank this process is: the one reader of the variables that torchrun and srun set for the ranks they start."""

import os

from onecurve.errors import UserError

# The variables of one rank. A shell may keep them from another job, and torch, Lightning and other libraries read them.
OF_A_RANK = ["RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
OF_A_RANK += ["MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID"]


def is_started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_started_by_srun() -> bool:
    """Return whether this process is one of several tasks that srun has started, not the script of their job."""
    return _has_tasks() and "SLURM_STEP_ID" in os.environ


def check_tasks_are_started() -> None:
    """Raise a UserError in a job with several tasks whose script starts this process itself, without srun."""
    if _has_tasks() and not (is_started_by_srun() or is_started_by_torchrun()):
        raise UserError(
            f"the job has several tasks (SLURM_NTASKS={os.environ['SLURM_NTASKS']}), but no srun started them: start "
            "`srun python train.py ...`, or ask for one task"
        )


def started_rank() -> int:
    """Return the rank that torchrun or srun gave this process; zero if neither started it, whatever its shell sets."""
    if is_started_by_torchrun():
        return int(os.environ.get("RANK", 0))
    return int(os.environ.get("SLURM_PROCID", 0)) if is_started_by_srun() else 0


def forget_other_ranks() -> None:
    """Remove the variables of a rank from a process that no launcher has started."""
    if not (is_started_by_torchrun() or is_started_by_srun()):
        for name in OF_A_RANK:
            os.environ.pop(name, None)


def _has_tasks() -> bool:
    is_interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")  # as Lightning's SLURMEnvironment
    return int(os.environ.get("SLURM_NTASKS", 1)) > 1 and not is_interactive
