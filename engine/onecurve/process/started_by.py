"""Who started this process, and as which rank: the one reader of the variables that torchrun and srun set."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from onecurve.errors import UserError

# The variables of one rank. A shell may keep them from another job, and torch, Lightning and other libraries read them.
OF_A_RANK = ["RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
OF_A_RANK += ["MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID"]
_OF_ELASTIC = [*OF_A_RANK, "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"]
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_")


def started_by() -> str | None:
    """Return `torchrun` or `srun`, if it has started this process as one of several ranks; otherwise None.

    Local workers have `torchrun` too: torch's elastic launcher starts them (`onecurve/launch/start.py`).
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "srun" if _has_tasks() and "SLURM_STEP_ID" in os.environ else None  # not the script of a job


def check_tasks_are_started() -> None:
    """Raise a UserError in a job with several tasks whose script starts this process itself, without srun."""
    if _has_tasks() and started_by() is None:
        raise UserError(
            f"the job has several tasks (SLURM_NTASKS={os.environ['SLURM_NTASKS']}), but no srun started them: start "
            "`srun python train.py ...`, or ask for one task"
        )


def detect_cluster_environment() -> Any:
    """Return Lightning's environment of torchrun or SLURM, or None if neither started this process as one of many."""
    if started_by() is None:
        return None
    from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    if started_by() == "torchrun":
        return TorchElasticEnvironment()
    if "SLURM_NTASKS_PER_NODE" not in os.environ:  # which Lightning requires
        raise UserError("srun started several tasks: give it --ntasks-per-node in place of --ntasks")
    return SLURMEnvironment(auto_requeue=False)


def started_rank() -> int:
    """Return the rank that torchrun or srun gave this process; zero if neither started it, whatever its shell sets."""
    if started_by() == "torchrun":
        return int(os.environ.get("RANK", 0))
    return int(os.environ.get("SLURM_PROCID", 0)) if started_by() == "srun" else 0


def forget_other_ranks() -> None:
    """Remove the variables of a rank from a process that no launcher has started."""
    if started_by() is None:
        for name in OF_A_RANK:
            os.environ.pop(name, None)


@contextmanager
def variables_replaced(names: Iterable[str], **values: str) -> Iterator[None]:
    """Replace variables by `values`, or by none; others stay: threads read them, and code of the user sets them."""
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


def take_environment(of_launcher: Mapping[str, str]) -> None:
    """Give this rank the variables of its launcher, besides those that torch's elastic launcher has set for the rank.

    A fork server has those of the time when it began. What libraries read when they are imported stays so, such as
    `TORCH_LOGS` in a later run of a notebook.
    """
    names = [name for name in os.environ if name in _OF_ELASTIC or name.startswith(("TORCHELASTIC_", "TORCH_NCCL_"))]
    own = {name: os.environ[name] for name in names}
    os.environ.clear()
    os.environ.update({**of_launcher, **own})


def forget_launcher(keep: str) -> None:
    """Remove the launcher's variables, but one, so that a strategy does not take a single process for one of many."""
    for name in list(os.environ):
        if name.startswith(_OF_LAUNCHERS) and name != keep:
            del os.environ[name]


def _has_tasks() -> bool:
    is_interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")  # as Lightning's SLURMEnvironment
    return int(os.environ.get("SLURM_NTASKS", 1)) > 1 and not is_interactive
