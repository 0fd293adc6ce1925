"""A process that is a rank: its devices, log and memory, and the timeouts and the end of its process groups."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from signal import SIGKILL
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from onecurve.errors import UserError, in_python
from onecurve.patches.torch import set_timeout_of_all_groups
from onecurve.process.signals import Stopped, drop_lost_readers
from onecurve.process.started_by import started_by

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.plugins.environments import ClusterEnvironment

REPORT_FILE = "TORCHELASTIC_ERROR_FILE"  # environment variable with the path of a rank's report
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # the constants of glibc's malloc.h
_RSS_BYTES = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss
_PAUSE = 0.05  # seconds, so that gloo's threads can take the GIL
_MARGIN = timedelta(minutes=5)
_ERROR_DELAY = 3.0  # seconds in which rank zero ends the others, if all ranks have an error
_LOST_RANK = ("gloo/transport", "ncclRemoteError")  # in an error of gloo or NCCL
_trainers = WeakSet["L.Trainer"]()  # of a script
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
_SHOWN = (
    "onecurve.",
    "src.",
    "lightning.pytorch.callbacks.early_stopping",
    "lightning.pytorch.callbacks.model_summary",
)


def detect_cluster_environment() -> ClusterEnvironment | None:
    """Return the environment of torchrun or SLURM, or None if neither started this process as one of several ranks."""
    if started_by() is None:
        return None
    from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    if started_by() == "torchrun":
        return TorchElasticEnvironment()
    if "SLURM_NTASKS_PER_NODE" not in os.environ:  # which Lightning requires
        raise UserError("srun started several tasks: give it --ntasks-per-node in place of --ntasks")
    return SLURMEnvironment(auto_requeue=False)


def resolve_devices(accelerator: str, devices: Any) -> tuple[str, int | list[int]]:
    """Return the accelerator without `auto`, and the number of devices per node or the listed GPU indices."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator == "auto":
        accelerator = found.type if found else "cpu"
    if accelerator != "cpu" and found is None:
        raise UserError(f"trainer.accelerator={accelerator}, but this machine has none: set auto or cpu")
    num_gpus = 0 if accelerator == "cpu" else torch.accelerator.device_count()
    if devices in ("auto", -1):
        # torchrun has already started LOCAL_WORLD_SIZE processes.
        return accelerator, int(os.environ.get("LOCAL_WORLD_SIZE", num_gpus or 1))
    indices = list(devices) if isinstance(devices, Sequence) and not isinstance(devices, str) else []
    count = devices if isinstance(devices, int) else len(indices)
    if count < 1:
        raise UserError(f"trainer.devices={devices} is no number of devices: give a number, a list of GPUs, or auto")
    if len(set(indices)) < len(indices):
        raise UserError(f"trainer.devices={devices} lists a device twice: list each one once")
    if accelerator == "cpu":
        return accelerator, count
    if max(count, max(indices, default=0) + 1) > num_gpus:
        raise UserError(
            f"trainer.devices={devices}, but this machine has {num_gpus} GPU{'s' * (num_gpus > 1)}: "
            f"set trainer.devices={num_gpus}, or trainer.accelerator=cpu to run processes on the CPU"
        )
    return accelerator, indices or count


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


def shorten_user_errors(trainer: L.Trainer, rank: int) -> None:
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
            strategy: Any = getattr(trainer, "strategy", None)  # none if an argument of the trainer is invalid
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


def cores_per_rank(ranks: int) -> int:
    """Return the CPU cores for each of the ranks of this node; torch would use all of them in each process.

    GPU ranks need them as well, for data that is read or transformed on the host. A rank that SLURM started has cores
    of its own.
    """
    if "SLURM_CPUS_PER_TASK" in os.environ and started_by() != "torchrun":
        return int(os.environ["SLURM_CPUS_PER_TASK"])
    return len(usable_cores()) // ranks


def usable_cores() -> list[int]:
    """Return the numbers of the CPU cores that this process may use; on macOS all, because it does not tell."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


def tune_malloc() -> bool:
    """Let glibc's malloc reuse large blocks; return whether it accepted both options.

    By default it maps each large block anew, and the kernel fills its pages with zeros. For the activations of a
    network this takes a fifth of each step or more. The price is fragmentation: up to a fifth more memory was measured.
    """
    return _mallopt(_MMAP_MAX, 0) and _mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def map_large_blocks() -> bool:
    """Let glibc's malloc map blocks of 32 MiB and more again; return whether it accepted both options.

    FSDP gathers and frees weights of many sizes, which leaves holes in memory that is kept: a process of two with
    180 MiB of weights grew from 1.2 to 2.8 GiB in sixty steps.
    """
    return _mallopt(_MMAP_THRESHOLD, 2**25) and _mallopt(_MMAP_MAX, 2**16)


def _mallopt(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and bool(mallopt(option, value))


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak of the allocated tensors on a GPU, or of the resident set size on a CPU, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_BYTES / 2**20


def set_timeouts_after(seconds: float) -> None:
    """Let the collectives of all process groups fail some minutes after `launch.timeout` seconds.

    The timer of `onecurve/run/stopping.py` then ends the rank that hangs. NCCL would end one that waits for it: by
    default after half an hour, and after ten minutes in the subgroups of a device mesh, which take no timeout.
    """
    if dist.is_initialized():
        set_timeout_of_all_groups(timedelta(seconds=seconds) + _MARGIN)


def close_process_group() -> None:
    """Destroy the process group. A process that exits while its gloo group exists may abort.

    The pause avoids a deadlock in torch (docs/upstream/gloo_gil.md). A thread of gloo that still has to free a tensor
    waits for the GIL, and the destructor of the group holds the GIL while it waits for that thread.
    """
    if dist.is_initialized():
        time.sleep(_PAUSE)
        dist.destroy_process_group()


@contextmanager
def process_group_closed() -> Iterator[None]:
    """Close the process group after the code in this context, also if a signal has stopped all ranks at one step.

    After another error it stays open: closing it would fail the other ranks before this one has reported its error, and
    NCCL might wait for them.
    """
    try:
        yield
    except Stopped:
        close_process_group()
        raise
    close_process_group()
