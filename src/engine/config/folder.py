"""The run folder, its newest checkpoint, and the run id; a continued run keeps folder and id."""

import contextlib
import os
import secrets
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from src.engine.state.run_files import CHECKPOINTS, LAST, PREVIOUS
from src.engine.utils.errors import UserError
from src.engine.utils.targets import with_moved_targets

CONFIG = "config.yaml"
# The environment variable of the command as typed, a list in JSON; it reaches the jobs of a sweep in other processes.
COMMAND = "TRAIN_COMMAND"
_SWEEP_ID = "sweep_id"  # a file in the folder of a sweep
PROJECT = Path(__file__).parents[3]


def is_rank_zero() -> bool:
    """Return whether this process is rank zero, or a launcher whose ranks have not started yet."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0


def project_path(path: str) -> str:
    """Return the absolute path of a default folder, which is in the project's folder, wherever train.py is started."""
    return str(PROJECT / path)


def run_folder(runs: str, name: str, *, _root_: DictConfig) -> str:
    """Make the run folder and return its path, for `hydra.run.dir`.

    The configuration `_root_` decides: the folder of the run to continue, `run_dir`, or `name` in `runs`. With
    `resume`, a SLURM job gets a folder named by its job id, and finds it again when it is requeued. Ranks above zero
    get '.', because they receive rank zero's folder later.

    Raises:
        UserError: if the folder cannot be made.
    """
    if not is_rank_zero():
        return "."
    if _root_.fit and _root_.ckpt_path and (continued := folder_of(Path(_root_.ckpt_path))):
        return str(continued)
    if _root_.run_dir:
        return _make_folder(Path(_root_.run_dir).expanduser())
    if _root_.resume and "SLURM_JOB_ID" in os.environ:
        return _make_folder(Path(runs, f"slurm-{os.environ['SLURM_JOB_ID']}"))
    return _make_folder(Path(runs, name))


def sweep_folder(runs: str) -> str:
    """Make a new folder in `runs` for a sweep and return its path, for `hydra.sweep.dir`."""
    return _make_folder(Path(runs, unique_name()), "hydra.sweep.dir") if is_rank_zero() else "."


def unique_name() -> str:
    """Return a name for a new folder: the time and a random number."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"


def _make_folder(folder: Path, option: str = "run_dir") -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder} ({error.strerror}): set {option} to another") from None
    return str(folder)


def remove_if_unused(folder: Path) -> None:
    """Remove the folder of a run that was refused: it may contain logs, which add nothing to the error.

    Ranks above zero remove nothing: they have no folder of their own, but the working directory.
    """
    if is_rank_zero() and folder.is_dir() and {path.name for path in folder.iterdir()} <= {"logs"}:
        shutil.rmtree(folder, ignore_errors=True)


def folder_of(ckpt_path: Path) -> Path | None:
    """Return the run folder that `ckpt_path` names, or that contains the checkpoint `ckpt_path`, if there is one."""
    ckpt_path = ckpt_path.expanduser().absolute()
    candidates = (ckpt_path, ckpt_path.parent.parent)
    return next((folder for folder in candidates if (folder / CONFIG).is_file()), None)


def saved_config(folder: Path) -> Any:
    """Return the configuration that a run saved in its folder.

    Raises:
        UserError: if another version of this code saved it.
    """
    saved = OmegaConf.create(with_moved_targets((folder / CONFIG).read_text()))
    if "runtime" not in saved:
        raise UserError(f"the run in {folder} was made by another version of this code: continue it with that version")
    return saved


def run_and_sweep_id(folder: Path, is_sweep: bool) -> tuple[str, str | None]:
    """Return the W&B run id and the sweep id.

    A continued run keeps its saved ids, and a W&B agent sets them in the environment. Otherwise the run id is the name
    of the run folder, in a sweep preceded by the name of the sweep folder, and a random number. Two folders may have
    the same name. The sweep id is the same for all jobs.
    """
    if (folder / CONFIG).is_file():
        saved = saved_config(folder).runtime
        return saved.run_id, saved.sweep_id
    if "WANDB_SWEEP_ID" in os.environ:  # wandb's agent started this process, and gave the run its id
        return os.environ["WANDB_RUN_ID"], os.environ["WANDB_SWEEP_ID"]
    token = secrets.token_hex(3)
    if is_sweep:
        return f"{folder.parent.name}-{folder.name}-{token}", _sweep_id(folder.parent)
    return f"{folder.name}-{token}", None


def _sweep_id(sweep: Path) -> str:
    """Return the id in the sweep's folder. The first job writes it; several jobs may start at once."""
    file, token = sweep / _SWEEP_ID, secrets.token_hex(3)
    if not file.exists():
        own = sweep / f".{_SWEEP_ID}.{token}"
        own.write_text(f"{sweep.name}-{token}")
        with contextlib.suppress(OSError):  # another job was faster, or the file system has no hard links
            os.link(own, file)
        if not file.exists():
            own.replace(file)
        own.unlink(missing_ok=True)
    return file.read_text()


def newest_run(runs: Path) -> Path | None:
    """Return the folder of the run, or of the job of a sweep, that was started last and has a checkpoint, if any."""
    configs = [*runs.glob(f"*/{CONFIG}"), *runs.glob(f"*/*/{CONFIG}")]
    started = [file for file in configs if any((file.parent / CHECKPOINTS).glob("*.ckpt"))]
    return max(started, key=lambda file: file.stat().st_mtime_ns).parent if started else None


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a run folder, if any; warn of each corrupt one."""
    for file in sorted((folder / CHECKPOINTS).glob("*.ckpt"), key=_recency_key):
        from src.engine.state.io import check_is_complete  # late, since it imports Lightning

        try:
            check_is_complete(file)
            return file
        except UserError as error:
            print(f"warning: {error}; looking for the one before it", file=sys.stderr)
    return None


def _recency_key(file: Path) -> tuple[bool, bool, int]:
    """Return the sort key that puts the newest checkpoint first.

    The names come before the modification time, because copying a folder may reset the time.
    """
    return file.name != LAST, file.name != PREVIOUS, -file.stat().st_mtime_ns


def with_newest_checkpoint(cfg: DictConfig) -> DictConfig:
    """Return the configuration with `ckpt_path` set to the newest checkpoint, for a restart after a failure."""
    if cfg.fit and (newest := newest_checkpoint(Path(cfg.run_dir))):
        cfg = cfg.copy()
        cfg.ckpt_path = str(newest)
    return cfg


def remove_partial_checkpoints(folder: Path) -> None:
    """Delete the temporary files of a save that was killed. No process may be saving a checkpoint meanwhile."""
    for file in (folder / CHECKPOINTS).glob(".*.part"):
        file.unlink(missing_ok=True)
