"""The identity of a run: a folder of its own, whose name is its id; a run that is continued keeps both."""

import os
import secrets
from datetime import datetime
from pathlib import Path

from omegaconf import OmegaConf

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
LAST, PREVIOUS = "last.ckpt", "previous.ckpt"  # the latest state, and the one it replaced


def register_resolver() -> None:
    """Let `hydra.run.dir` be `${run_folder:runs,${ckpt_path},${fit},${run_dir},${resume}}`."""
    OmegaConf.register_new_resolver("run_folder", run_folder, use_cache=True, replace=True)


def run_folder(
    runs: str, ckpt_path: str | None, fit: bool, run_dir: str | None = None, resume: str | None = None
) -> str:
    """The folder of the run that starts now: the given one, the one it continues, or one that no other run can have.

    A SLURM job that resumes by itself has one of its own, which it finds again when it is requeued.

    Ranks above zero that torchrun or SLURM started make none: they learn rank zero's.
    """
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) > 0:
        return "."
    if fit and ckpt_path and (known := folder_of(Path(ckpt_path))):
        return str(known)
    if run_dir:
        return str(Path(run_dir).expanduser())
    if resume and "SLURM_JOB_ID" in os.environ:
        return f"{runs}/slurm-{os.environ['SLURM_JOB_ID']}"
    return f"{runs}/{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"


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
    given = {_name(word) for word in argv}
    saved = OmegaConf.load(folder / CONFIG).overrides
    kept = [word for word in saved if not {_name(word), _name(word).partition(".")[0]} & given]
    return [*argv[:at], *kept, *argv[at:]]


def _name(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def run_id(folder: Path, sweep: bool) -> str:
    """The run's id: the one it has, or else its folder's name, below the sweep's where there is one."""
    if (folder / CONFIG).is_file():
        return OmegaConf.load(folder / CONFIG).run_id
    return f"{folder.parent.name}-{folder.name}" if sweep else folder.name
