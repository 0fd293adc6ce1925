"""Choose the run folder and the run id; a continued run keeps both."""

import os
import secrets
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

CONFIG = "config.yaml"


def is_rank_zero() -> bool:
    """Return whether this process is rank zero, or a launcher whose ranks have not started yet."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0


def run_folder(
    runs: str, ckpt_path: str | None, fit: bool, run_dir: str | None = None, resume: str | None = None
) -> str:
    """Return the run folder: that of the run to continue, `run_dir`, or a new one with a unique name.

    With `resume`, a SLURM job gets a folder named by its job id, and finds it again when it is requeued. Ranks above
    zero return '.', because they receive rank zero's folder.
    """
    if not is_rank_zero():
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


def run_and_sweep_id(folder: Path, sweep: bool) -> tuple[str, str | None]:
    """Return the W&B run id and the sweep id.

    A continued run keeps its saved ids, and a W&B agent sets them in the environment. Otherwise the run id is the name
    of the run folder, in a sweep preceded by the name of the sweep folder.
    """
    if (folder / CONFIG).is_file():
        saved: Any = OmegaConf.load(folder / CONFIG)
        return saved.run_id, saved.get("sweep_id")
    if "WANDB_SWEEP_ID" in os.environ:  # wandb's agent started this process for a run that it has an id for
        return os.environ["WANDB_RUN_ID"], os.environ["WANDB_SWEEP_ID"]
    return (f"{folder.parent.name}-{folder.name}", folder.parent.name) if sweep else (folder.name, None)
