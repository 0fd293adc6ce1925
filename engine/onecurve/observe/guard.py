"""Start the configured loggers, whose failures never end a training run; `CSVLogger` handles a full disk itself."""

import logging
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from lightning.pytorch.loggers.logger import Logger

_log = logging.getLogger(__name__)
_MAX_FAILURES = 3  # in a row
_GUARDED = ("after_save_checkpoint", "finalize", "save", "watch")  # and all methods `log_...`


def start_loggers(loggers: Iterable[Logger]) -> list[Logger]:
    """Start each logger. Leave out one that fails, and guard the methods of the others."""
    started = []
    for logger in loggers:
        try:
            getattr(logger, "experiment", None)  # its first use
        except Exception as error:
            _warn(f"{type(logger).__name__} cannot start, and training continues without it", error)
            continue
        # On the object alone, so that callbacks still find the logger by its class.
        for name in [name for name in dir(logger) if name in _GUARDED or name.startswith("log_")]:
            if callable(method := getattr(logger, name)):
                setattr(logger, name, _guard(method, f"{type(logger).__name__}.{name}"))
        started.append(logger)
    return started


def _guard(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a method that warns if it fails, and does nothing after three failures in a row.

    Without that limit, training would wait at each log point for a server that is down; MLflow retries for minutes.
    """
    failures = 0

    @wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        nonlocal failures
        if failures == _MAX_FAILURES:
            return None
        try:
            result = method(*args, **kwargs)
        except Exception as error:
            failures += 1
            outcome = "is not called again" if failures == _MAX_FAILURES else "failed"
            _warn(f"{name} {outcome}, and training continues", error)
            return None
        failures = 0
        return result

    return guarded


def _warn(outcome: str, error: Exception) -> None:
    reason = str(error).strip().split("\n")[0]
    _log.warning("%s: %s: %s", outcome, type(error).__name__, reason)
