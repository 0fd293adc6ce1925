"""The checkpoint from which a run goes on by itself."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from src.checkpoint.run_files import CHECKPOINTS, LAST, PREVIOUS
from src.utils.errors import UserError


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run folder, if it has any; corrupt ones are passed over with a warning."""
    for file in sorted((folder / CHECKPOINTS).glob("*.ckpt"), key=_age):
        from src.checkpoint.integrity import check_is_complete  # late, since it imports Lightning

        try:
            check_is_complete(file)
            return file
        except UserError as error:
            print(f"warning: {error}; looking for the one before it", file=sys.stderr)
    return None


def _age(file: Path) -> tuple[bool, bool, int]:
    """What the latest has least of; a copied folder may have lost its times, but not its names."""
    return file.name != LAST, file.name != PREVIOUS, -file.stat().st_mtime_ns


def continued(cfg: DictConfig) -> DictConfig:
    """The configuration of a run that starts again after a failure."""
    if cfg.fit and (newest := newest_checkpoint(Path(cfg.run_dir))):
        cfg = cfg.copy()
        cfg.ckpt_path = str(newest)
    return cfg


def remove_fragments(folder: Path) -> None:
    """Delete what a process that was killed while it saved has left; none may be saving now."""
    for fragment in (folder / CHECKPOINTS).glob(".*.part"):
        fragment.unlink(missing_ok=True)
