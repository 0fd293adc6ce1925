"""Record how a run ended, if its rank zero could not: what failed, which rank died, or which signal came."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT, Signals

from filelock import Timeout
from omegaconf import DictConfig

from src.engine.launch.failures import RankDiedError, RankFailedError
from src.engine.launch.report import run_report
from src.engine.utils.errors import UserError
from src.engine.utils.events import append_end, append_event, append_kill, last_logged_step
from src.engine.utils.locks import named_lock
from src.engine.utils.signals import Stopped

_WAIT = 5.0  # seconds in which the processes of a killed start end


@contextmanager
def run_recorded(cfg: DictConfig, is_recorder: bool = True) -> Iterator[None]:
    """Record that an earlier process of the run was killed, then how this one ends, and write the page of the run.

    Args:
        cfg: the resolved configuration.
        is_recorder: whether this process records the run; one of each run does.

    Raises:
        UserError: if another process of this machine records the same run.
    """
    if not is_recorder:
        yield
        return
    with _only_start(cfg.run_dir):
        append_kill(cfg.run_dir)
        with run_report(cfg):
            try:
                yield
            except BaseException as error:
                append_end(cfg.run_dir, *_event_and_reason(error))
                raise


@contextmanager
def _only_start(run_dir: str) -> Iterator[None]:
    lock = named_lock(f"run {Path(run_dir).resolve()}")
    try:
        lock.acquire(timeout=_WAIT)
    except Timeout:
        raise UserError(
            f"run_dir={run_dir}: another start of this run is in progress on this machine: stop it, or choose another "
            "folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def record_restart(run_dir: str, failed: RankFailedError) -> None:
    """Append the failure of the ranks, and that they start again."""
    event, reason = _event_and_reason(failed)
    append_end(run_dir, event, reason)
    append_event(run_dir, "restart", last_logged_step(run_dir), reason)


def _event_and_reason(error: BaseException) -> tuple[str, str]:
    if isinstance(error, Stopped):
        return "stopped", Signals(error.number).name
    if isinstance(error, KeyboardInterrupt):
        return "stopped", SIGINT.name
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, RankFailedError):  # stacks follow in further lines
        return "killed" if isinstance(error, RankDiedError) else "failed", lines[0]
    return "failed", lines[-1] if isinstance(error, UserError) else f"{type(error).__name__}: {lines[-1]}"
