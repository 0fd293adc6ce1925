"""Signals that ask a run to save and stop: Ctrl-C, and those that schedulers send before they end a job.

A handler only sets a flag; `onecurve/run/stopping.py` reads it between two steps. The flag of a launcher is a file,
whose path its workers inherit.
"""

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
FLAG_FILE = "STOP_FLAG_FILE"  # environment variable of a launcher's workers
RESIZE = 1  # a launcher asks its ranks to save and end; the ranks take the largest number, so a signal (2 or more) wins
_DUPLICATE_WINDOW = 2.0  # seconds in which one request can arrive from the scheduler, its job step and a launcher
_INTERRUPT_WINDOW = 0.25  # seconds in which one Ctrl-C can arrive from the terminal and from torchrun
_STOPPING = b"\nsaving and stopping before the next step; Ctrl-C again stops at once, without saving\n"
_SHOW_CURSOR = b"\033[?25h"  # a progress bar hides it
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_received: list[tuple[int, float]] = []  # signal number and time


class Stopped(SystemExit):
    """The end of a run after a signal, before which it has saved if it could; the exit code is 128 + the number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def install_handlers(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Install the handler for the signals; return the previous handlers. Python allows it in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in SIGNALS}


def restore_handlers(handlers: dict[int, Any]) -> None:
    """Undo `install_handlers`.

    After a request the handlers stay, because a late copy of it must not change the exit code.
    """
    if not _received and threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def on_signal(number: int, frame: Any) -> None:
    """Handle a signal in a rank: record the first request, and end the process at a second one."""
    if record_signal(number):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def record_signal(number: int) -> bool:
    """Record a signal. Return True if it is a second request, not a late copy of the first.

    The process that the user started answers Ctrl-C at once, not the ranks that it has started. A handler may interrupt
    a print, so it writes to the file descriptor, whose reader, such as `tee`, may have ended at the same Ctrl-C.
    """
    _received.append((number, time.monotonic()))
    window = _INTERRUPT_WINDOW if number == signal.SIGINT else _DUPLICATE_WINDOW
    is_second = _received[-1][1] - _received[0][1] > window
    with suppress(OSError):
        if is_second and os.isatty(2):
            os.write(2, _SHOW_CURSOR)
        elif number == signal.SIGINT and len(_received) == 1 and _is_first_process():
            os.write(2, _STOPPING)
    return is_second


def _is_first_process() -> bool:
    return multiprocessing.current_process().name == "MainProcess" and int(os.environ.get("LOCAL_RANK", 0)) == 0


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent has ended, in whatever way; macOS cannot do this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before that call
        os._exit(1)


def prepare_started_process() -> None:
    """Make a new process end with its launcher, and at a Ctrl-C that comes before its handlers are installed.

    Python's handler of SIGINT would raise KeyboardInterrupt, after which torch's launchers report success.
    """
    die_with_parent(os.getppid())
    launcher: Any = multiprocessing.parent_process()
    if launcher.pid != os.getppid():  # the parent is a fork server, which lives as long as its children
        threading.Thread(target=_end_with, args=[launcher, os.getppid()], daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # which a fork server blocks


def _end_with(launcher: Any, server: int) -> None:
    """End with the launcher; the kernel ends the other ranks with the fork server, also one that runs no thread."""
    launcher.join()
    if os.getppid() == server:
        os.kill(server, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def outlive_requests() -> None:
    """Let a worker of a loader outlive signals to all processes: the rank still fetches a batch, saves and stops.

    Of SIGTERM, only the rank's own counts, by which DataLoader ends a worker that hangs.
    """
    for number in set(SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # macOS does not tell who sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_exit_when_terminated_by, args=[os.getppid()], daemon=True).start()


def _exit_when_terminated_by(rank: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank:
        pass
    os._exit(0)  # with another code, DataLoader would report a failed worker


def requested() -> int:
    """Return the first signal of this process or its launcher, RESIZE if the launcher asks for other devices, or 0."""
    if _received:
        return _received[0][0]
    flag = os.environ.get(FLAG_FILE)
    if flag and Path(flag).exists():
        return int(Path(flag).read_text())
    return RESIZE if flag and resize_file().exists() else 0


def drop_lost_readers() -> None:
    """Let output to a pipe whose reader has ended go nowhere: the Ctrl-C that stops a run ends its `tee` as well."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)  # an error is reported unasked
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def resize_file() -> Path:
    """Return the file by which a launcher asks its ranks to save and end; a file of its own, so no signal is lost."""
    return Path(os.environ[FLAG_FILE]).with_suffix(".resize")


@contextmanager
def ended_here() -> Iterator[None]:
    """In a notebook, let a signal end what runs in this context, and neither what comes later nor the kernel."""
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    except SystemExit as error:
        if error.code != 128 + signal.SIGINT:  # a run turns an interrupt into an exit, after it has saved
            raise
        raise KeyboardInterrupt from None
    finally:
        _received.clear()  # also of one that came after the last step, which would stop the next run
        restore_handlers(handlers)


@contextmanager
def forward_to_workers() -> Iterator[None]:
    """In a launcher, forward the first signal to the workers; a second signal ends them at once."""
    from torch.distributed.elastic.multiprocessing import SignalException

    with TemporaryDirectory(prefix="launcher-", ignore_cleanup_errors=True) as folder:
        flag = Path(folder) / "stop"

        def handler(number: int, frame: Any) -> None:
            if record_signal(number):
                raise SignalException("sent once more", signal.SIGKILL)  # elastic then kills the workers
            flag.parent.mkdir(parents=True, exist_ok=True)  # a cleaner of temporary files may have removed it
            flag.with_suffix(".part").write_text(str(number))
            with suppress(FileNotFoundError):  # a copy of the signal, which `timeout` sends, has come in between
                flag.with_suffix(".part").rename(flag)

        handlers = install_handlers(handler)
        os.environ[FLAG_FILE] = str(flag)
        try:
            yield
        finally:
            del os.environ[FLAG_FILE]
            restore_handlers(handlers)
            if _received:
                install_handlers(on_signal)  # the flag is gone
