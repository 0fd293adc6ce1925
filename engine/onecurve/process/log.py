"""Where a rank keeps and shows messages and errors: its log, the terminal, and the report that its launcher reads."""

import logging
import os
import sys
import time
import warnings
from functools import cache
from pathlib import Path
from signal import SIGKILL
from types import TracebackType
from typing import Any
from weakref import WeakSet

from onecurve.errors import UserError, in_python
from onecurve.process.signals import drop_lost_readers

REPORT_FILE = "TORCHELASTIC_ERROR_FILE"  # environment variable with the path of a rank's report
_ERROR_DELAY = 3.0  # seconds in which rank zero ends the others, if all ranks have an error
_LOST_RANK = ("gloo/transport", "ncclRemoteError")  # in an error of gloo or NCCL
_trainers = WeakSet[Any]()  # of a script
# This advice does not apply here.
_IGNORED_WARNINGS = [
    "dataloader is not resumable",  # its sampler is
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
_SHOWN = (
    "onecurve.",
    "src.",
    "lightning.pytorch.callbacks.early_stopping",
    "lightning.pytorch.callbacks.model_summary",
)


def log_file(run_dir: str | Path, rank: int) -> Path:
    """Return the path of a rank's log."""
    return Path(run_dir) / "logs" / f"rank{rank}.log"


def report_error(error: Exception) -> bool:
    """Write the first error of this rank where its launcher reads it; return whether torch's elastic launcher does."""
    if REPORT_FILE not in os.environ:
        return False
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if not Path(os.environ[REPORT_FILE]).exists():
        get_error_handler().record_exception(error)
    return True


def log_to_folder(run_dir: str | Path, rank: int) -> None:
    """Send the log of this process to `run_dir/logs/rankN.log`, and above rank zero also its stdout and stderr."""
    file = log_file(run_dir, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    log = logging.FileHandler(file)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [log]
    if rank == 0:
        handlers.append(TerminalHandler())
    else:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.stream.fileno(), stream.fileno())
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=handlers, force=True)
    logging.captureWarnings(True)
    ignore_warnings()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def ignore_warnings() -> None:
    """Ignore advice of libraries that does not apply here."""
    for pattern in _IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", f".*{pattern}")


def log_script(rank: int) -> None:
    """Show what this library tells of a script's run, as Lightning does, unless it configures logging itself."""
    ignore_warnings()
    logger = logging.getLogger("onecurve")
    if not (logging.getLogger().handlers or logger.handlers):
        handler = logging.StreamHandler()
        handler.setLevel(logging.INFO if rank == 0 else logging.ERROR)
        handler.setFormatter(_ScriptFormatter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    elif rank > 0 and not logger.handlers:  # those of the script, such as Hydra's, would show each line on every rank
        logger.setLevel(logging.ERROR)


class _ScriptFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return in_python(super().format(record))


def shorten_user_errors(trainer: Any, rank: int) -> None:
    """Let a script that catches no `UserError` end with its message alone, from rank zero.

    Whatever else shows uncaught errors, such as rich or W&B, gets the error without its traceback. Rank zero ends the
    ranks that it has started. Another rank waits for that, or for torchrun, and then shows an error of its own.
    """
    _trainers.add(trainer)
    _replace_excepthook(rank)


@cache  # once in a process, and not again if somebody else has replaced it since
def _replace_excepthook(rank: int) -> None:
    show = sys.excepthook

    def show_shortened(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            show(kind, error, trace)
            if any(sign in str(error) for sign in _LOST_RANK):
                print("another rank has ended; fit(ckpt_path='last') continues the run", file=sys.stderr)
            return
        time.sleep(_ERROR_DELAY if rank > 0 else 0)
        error.__traceback__, error.__cause__ = None, None
        error.args = (in_python(str(error)),)
        show(kind, error, None)
        for trainer in _trainers:
            strategy = getattr(trainer, "strategy", None)  # none if an argument of the trainer is invalid
            if strategy and strategy.launcher:
                strategy.launcher.kill(SIGKILL)

    sys.excepthook = show_shortened


class TerminalHandler(logging.StreamHandler):  # no StreamHandler[TextIO] in Python 3.10
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

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Go on without a terminal whose reader has ended, as `| head` does; logging would print a traceback."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            drop_lost_readers()
        else:
            super().handleError(record)


def connect_debugger(rank: int) -> None:
    """Let `breakpoint()` in rank zero read the terminal, which multiprocessing closes; the other ranks pass over it."""
    if not os.isatty(0):
        return
    if rank == 0:
        sys.stdin = os.fdopen(0, closefd=False)
    else:
        os.environ.setdefault("PYTHONBREAKPOINT", "0")
