"""The log of each rank: a file in the run folder, and for rank zero also the terminal."""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TextIO

# This advice does not apply here: the data is in memory, and the sampler, not the loader, resumes an epoch.
_IGNORED_WARNINGS = [
    "does not have many workers",
    "dataloader is not resumable",
    "Checkpoint directory .* exists",
    "smaller than the logging interval",  # the first and the last step are logged anyway
    "The dirpath has changed",  # for an evaluation, which has a folder of its own
    "callbacks used to create the checkpoint need to be provided",  # a continued run may have other callbacks
    "LeafSpec",
    "The `srun` command is available",
    "torch.distributed is disabled, unavailable or uninitialized",
    "Couldn't infer the batch indices",  # a batch has the indices of its samples
    "torch.distributed.nn.functional.all_gather is deprecated",  # Lightning calls it
    "You have overridden `.*` in both `LightningModule` and",  # OrderedData calls the user's, wherever it is
    "Total length of `list` across ranks is zero",  # a loader that is an empty list: validation is off on purpose
]

# The terminal shows the messages of these loggers; of others, only warnings. ModelSummary logs its table.
_SHOWN = ("src.", "lightning.pytorch.callbacks.model_summary")


def log_file(run_dir: str | Path, rank: int) -> Path:
    """Return the path of a rank's log."""
    return Path(run_dir) / "logs" / f"rank{rank}.log"


def stack_file(run_dir: str | Path, rank: int) -> Path:
    """Return the path of the file for the stacks of a rank that hangs."""
    return log_file(run_dir, rank).with_suffix(".stack")


def log_to_folder(run_dir: str | Path, rank: int) -> None:
    """Send the log of this process to `run_dir/logs/rankN.log`, and above rank zero also its stdout and stderr."""
    file = log_file(run_dir, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(file)]
    handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if rank == 0:
        handlers.append(TerminalHandler())
    else:
        _redirect_output(file)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=handlers, force=True)
    logging.captureWarnings(True)
    for pattern in _IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", f".*{pattern}")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def _redirect_output(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Handler that looks up stdout for each message, because a progress bar replaces it, to print above the bar."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name.startswith(_SHOWN) or record.levelno >= logging.WARNING

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        if type(self.stream).__module__ != "rich.file_proxy":
            super().emit(record)
            return
        from rich import get_console

        # The stream of a rich progress bar would break a path that is longer than a line.
        get_console().print(self.format(record), soft_wrap=True, markup=False, highlight=False, emoji=False)


def connect_debugger(rank: int) -> None:
    """Let `breakpoint()` in rank zero read the terminal, which multiprocessing closes; the other ranks pass over it."""
    if not os.isatty(0):
        return
    if rank == 0:
        sys.stdin = os.fdopen(0, closefd=False)
    else:
        os.environ.setdefault("PYTHONBREAKPOINT", "0")
