"""The data of the configuration, and the disk of the run folder."""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from src.run.build import build
from src.utils.files import check_can_store

_CHECKPOINTS = 2_000_000_000  # bytes


def check_data(cfg: DictConfig) -> str:
    """Check that the images are complete, or can be downloaded or generated."""
    source = build(cfg.data.source)
    check = getattr(source, "check", None)
    if check is None:
        return f"{type(source).__name__} has no method `check`: the run prepares its images when it starts"
    return check(Path(cfg.data.root).expanduser())


def check_run_folder(cfg: DictConfig) -> str:
    """Check that checkpoints can be written in the run folder."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    return f"{check_can_store(folder, 'run_dir', _CHECKPOINTS)} in {folder}"
