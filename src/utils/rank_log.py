"""Each rank's log: its own file in the run folder; rank zero speaks on the terminal as well."""

import logging
import os
import sys
import warnings
from pathlib import Path

# Advice that does not hold here: the data is in memory, and the sampler, not the loader, knows how to resume.
_IGNORED_WARNINGS = [
    "does not have many workers",
    "dataloader is not resumable",
    "Checkpoint directory .* exists",
    "The dirpath has changed",  # for an evaluation, which has a folder of its own
    "LeafSpec",
    "The `srun` command is available",
    "torch.distributed is disabled, unavailable or uninitialized",
]


def log_file(run_dir: str | Path, rank: int) -> Path:
    """Where a rank's log is."""
    return Path(run_dir) / "logs" / f"rank{rank}.log"


def log_to_folder(run_dir: str | Path, rank: int) -> None:
    """Send this process's log to `run_dir/logs/rankN.log`; above rank zero, whatever it prints as well."""
    file = log_file(run_dir, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(file)]
    handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if rank == 0:
        handlers.append(_terminal())
    else:
        _redirect_output(file)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
    for pattern in _IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", f".*{pattern}")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def _terminal() -> logging.Handler:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(lambda record: record.name.startswith("src.") or record.levelno >= logging.WARNING)
    return handler


def _redirect_output(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
