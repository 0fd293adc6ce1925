"""The folders of runs, which a continued run keeps."""

import os
import secrets
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from onecurve.errors import UserError
from onecurve.process.started_by import started_rank
from onecurve.records.files import CONFIG

RECIPES = ("experiment", "preset", "debug")  # the groups of conf/ whose files set options of other groups
REQUIRED_GROUPS = ("data", "module", "strategy", "trainer")


# The project's folder is the first of Python's path with conf/train.yaml, else one around the working directory.
_FOLDERS = [*(Path(entry).absolute() for entry in sys.path), Path.cwd(), *Path.cwd().parents]
PROJECT = next((folder for folder in _FOLDERS if (folder / "conf" / "train.yaml").is_file()), Path.cwd())
CONF = PROJECT / "conf"


def run_folder(runs: str, name: str, *, _root_: DictConfig) -> str:
    """Make the run folder and return its path, for `hydra.run.dir`.

    The configuration `_root_` decides: the folder of the run to continue, `run_dir`, or `name` in `runs`. With
    `resume`, a SLURM job gets a folder named by its job id, and finds it again when it is requeued. Ranks above zero
    get '.', because they receive rank zero's folder later.
    """
    if started_rank() > 0:
        return "."
    if _root_.fit and _root_.ckpt_path and (continued := folder_of(Path(_root_.ckpt_path))):
        return str(continued)
    if _root_.run_dir:
        folder = Path(_root_.run_dir).expanduser()
    elif _root_.resume and "SLURM_JOB_ID" in os.environ:
        folder = Path(runs, f"slurm-{os.environ['SLURM_JOB_ID']}")
    else:
        folder = Path(runs, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder} ({error.strerror}): set run_dir to another") from None
    return str(folder)


def unique_name() -> str:
    """Return a name for a new folder: the time and a random number."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"


def remove_if_unused(folder: Path) -> None:
    """Remove the folder of a run that was refused: it may contain logs, which add nothing to the error.

    Ranks above zero remove nothing: they have no folder of their own, but the working directory.
    """
    if started_rank() == 0 and folder.is_dir() and {path.name for path in folder.iterdir()} <= {"logs"}:
        shutil.rmtree(folder, ignore_errors=True)


def folder_of(ckpt_path: Path) -> Path | None:
    """Return the run folder that `ckpt_path` names, or that contains the checkpoint `ckpt_path`, if there is one."""
    ckpt_path = ckpt_path.expanduser().absolute()
    candidates = (ckpt_path, ckpt_path.parent.parent)
    return next((folder for folder in candidates if (folder / CONFIG).is_file()), None)


def typed_overrides() -> list[str]:
    """Return the overrides as typed; Hydra would look for the option of a `${...}` among its own."""
    words: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return words


def saved_config(folder: Path) -> Any:
    """Return the configuration that a run saved in its folder."""
    try:
        saved = OmegaConf.load(folder / CONFIG)
    except yaml.YAMLError:
        saved = OmegaConf.create()
    if "runtime" not in saved:
        raise UserError(f"{folder / CONFIG} is damaged, or not that of a run of this version")
    return saved


def register_resolvers() -> None:
    """Register the functions that conf/ calls. `use_cache` lets an interpolation keep its first value."""
    OmegaConf.register_new_resolver("unique_name", unique_name, use_cache=True, replace=True)
    # A default folder is in the project's folder, wherever train.py is started.
    OmegaConf.register_new_resolver("project_path", lambda path: str(PROJECT / path), replace=True)
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
