"""The identity of a run: a folder of its own, whose name is its id; a run that is continued keeps both."""

import os
import secrets
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

CONFIG = "config.yaml"


def rank_zero() -> bool:
    """Whether this process is, or may yet be, the first of its ranks, as torchrun or SLURM number them."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0


def run_folder(
    runs: str, ckpt_path: str | None, fit: bool, run_dir: str | None = None, resume: str | None = None
) -> str:
    """The folder of the run that starts now: the given one, the one it continues, or one that no other run can have.

    A SLURM job that resumes by itself has one of its own, which it finds again when it is requeued.

    Ranks above zero that torchrun or SLURM started make none: they learn rank zero's.
    """
    if not rank_zero():
        return "."
    if fit and ckpt_path and (known := folder_of(Path(ckpt_path))):
        return str(known)
    if run_dir:
        return str(Path(run_dir).expanduser())
    if resume and "SLURM_JOB_ID" in os.environ:
        return f"{runs}/slurm-{os.environ['SLURM_JOB_ID']}"
    return f"{runs}/{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"


def remove_if_unused(folder: Path) -> None:
    """Remove the folder of a run that was refused: it may hold logs, which say no more than the error."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {"logs"}:
        shutil.rmtree(folder, ignore_errors=True)


def folder_of(ckpt_path: Path) -> Path | None:
    """The run folder that `ckpt_path` is, or lies in."""
    ckpt_path = ckpt_path.expanduser().absolute()
    return next((place for place in (ckpt_path, ckpt_path.parent.parent) if (place / CONFIG).is_file()), None)


def identity(folder: Path, sweep: bool) -> tuple[str, str | None]:
    """The run's id and its sweep's: those it has, or else its folder's name and the name of the sweep's above it."""
    if (folder / CONFIG).is_file():
        saved: Any = OmegaConf.load(folder / CONFIG)
        return saved.run_id, saved.get("sweep_id")
    if "WANDB_SWEEP_ID" in os.environ:  # wandb's agent started this process for a run that it has an id for
        return os.environ["WANDB_RUN_ID"], os.environ["WANDB_SWEEP_ID"]
    return (f"{folder.parent.name}-{folder.name}", folder.parent.name) if sweep else (folder.name, None)
