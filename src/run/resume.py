"""Find the newest run, and the checkpoint from which a run continues."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from src.checkpoint.run_files import CHECKPOINTS, LAST, PREVIOUS
from src.run.folder import CONFIG
from src.utils.errors import UserError


def newest_run(runs: Path) -> Path | None:
    """Return the folder of the run, or of the job of a sweep, that was started last and has a checkpoint, if any."""
    configs = [*runs.glob(f"*/{CONFIG}"), *runs.glob(f"*/*/{CONFIG}")]
    started = [file for file in configs if any((file.parent / CHECKPOINTS).glob("*.ckpt"))]
    return max(started, key=lambda file: file.stat().st_mtime_ns).parent if started else None


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a run folder, if any; warn of each corrupt one."""
    for file in sorted((folder / CHECKPOINTS).glob("*.ckpt"), key=_recency_key):
        from src.checkpoint.integrity import check_is_complete  # late, since it imports Lightning

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
