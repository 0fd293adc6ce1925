"""The identity of a run: a folder of its own, whose name is its id; a run that is continued keeps both."""

import os
import secrets
import shutil
from collections.abc import Iterable
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from src.errors import UserError

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
LAST, PREVIOUS = "last.ckpt", "previous.ckpt"  # the latest state, and the one it replaced
_SWEEP = "multirun.yaml"  # Hydra's own record of a sweep


def register_resolvers() -> None:
    """Let `hydra.run.dir` be `${run_folder:...}`, and name the folders of a sweep's jobs."""
    from src.sweeps.record import job_folder  # late: it imports this file

    OmegaConf.register_new_resolver("run_folder", run_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)


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


def checkpoint_file(given: Path) -> Path:
    """The checkpoint that a run folder, or a file's own name, stands for."""
    given = given.expanduser().absolute()
    return given / CHECKPOINTS / LAST if given.is_dir() else given


def folder_of(ckpt_path: Path) -> Path | None:
    """The run folder that `ckpt_path` is, or lies in."""
    ckpt_path = ckpt_path.expanduser().absolute()
    return next((place for place in (ckpt_path, ckpt_path.parent.parent) if (place / CONFIG).is_file()), None)


def with_saved_overrides(argv: list[str]) -> list[str]:
    """The command line with the overrides of the run in `ckpt_path=`, if there is one, in front of its own.

    An option given again replaces the saved one; a group chosen anew (`model=...`) all those of the group.
    """
    at = next((place for place, word in enumerate(argv) if word.startswith("ckpt_path=")), None)
    folder = folder_of(Path(argv[at].partition("=")[2].strip("'\""))) if at is not None else None
    if folder is None:
        return argv
    return [*argv[:at], *_not_given(OmegaConf.load(folder / CONFIG).overrides, argv), *argv[at:]]


def with_saved_sweep(argv: list[str]) -> list[str]:
    """The command line that started the sweep in `sweep=`, if there is one, with its own overrides behind.

    Raises:
        UserError: if there is no sweep in that folder.
    """
    at = next((place for place, word in enumerate(argv) if word.startswith("sweep=")), None)
    if at is None:
        return argv
    folder = Path(argv[at].partition("=")[2].strip("'\"")).expanduser().absolute()
    if not (folder / _SWEEP).is_file():
        raise UserError(
            f"{argv[at]}: there is no sweep in that folder ({folder / _SWEEP}): give the one it was made in"
        )
    saved = yaml.safe_load((folder / _SWEEP).read_text())["hydra"]["overrides"]  # as typed, nothing resolved
    quoted = str(folder).replace("'", "\\'")
    own = [word for word in saved["hydra"] if _name(word) not in ("hydra.sweep.dir", "hydra.mode")]
    words = [*_not_given([*own, *saved["task"]], argv), f"hydra.sweep.dir='{quoted}'"]
    return [argv[0], *([] if {"-m", "--multirun"} & set(argv) else ["-m"]), *argv[1:at], *words, *argv[at + 1 :]]


def _not_given(saved: Iterable[str], argv: list[str]) -> list[str]:
    """The saved overrides of options that are not given again, nor is the group they belong to."""
    given = {_name(word) for word in argv}
    return [word for word in saved if not given.intersection(accumulate(_name(word).split("."), "{}.{}".format))]


def _name(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].replace("/", ".")


def identity(folder: Path, sweep: bool) -> tuple[str, str | None]:
    """The run's id and its sweep's: those it has, or else its folder's name and the name of the sweep's above it."""
    if (folder / CONFIG).is_file():
        saved: Any = OmegaConf.load(folder / CONFIG)
        return saved.run_id, saved.get("sweep_id")
    if "WANDB_SWEEP_ID" in os.environ:  # wandb's agent started this process for a run that it has an id for
        return os.environ["WANDB_RUN_ID"], os.environ["WANDB_SWEEP_ID"]
    return (f"{folder.parent.name}-{folder.name}", folder.parent.name) if sweep else (folder.name, None)
