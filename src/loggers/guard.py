"""Guard of the configured loggers: the failure of a logger never ends a training run."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from lightning.pytorch.loggers.logger import DummyExperiment, DummyLogger, Logger
from lightning.pytorch.utilities import rank_zero_only

_log = logging.getLogger(__name__)
MAX_FAILURES = 3  # in a row
MAX_SECONDS = 10.0  # of a call that fails, since training waits for it


class GuardedLogger:
    """Proxy of a logger. A call that fails does nothing, and the first one is reported by a warning.

    After three failures of a method in a row, or one that takes longer than ten seconds, all calls do nothing.
    Callbacks find a logger by its class, so `isinstance` reports the class of that logger. `experiment` is a proxy as
    well, which gets the real object at its first use. Lightning asks for it when a run starts, and would wait for it.

    Args:
        logger: the logger.
        option: the option that configures it, for the warning.
    """

    def __init__(self, logger: Logger, option: str) -> None:
        self._type, self._logger, self._option = type(logger), cast(Any, logger), option
        self._failures: Counter[str] = Counter()  # in a row, by method
        self._has_warned = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._type

    def __reduce__(self) -> Any:
        return GuardedLogger, (self._logger, self._option)

    def __getattr__(self, name: str) -> Any:
        if name == "experiment" and hasattr(self._type, name):
            return NullExperiment() if rank_zero_only.rank > 0 else _GuardedExperiment(self)
        try:
            value = getattr(self._logger, name)
        except AttributeError:  # `hasattr` asks for an attribute that does not exist
            raise
        except Exception as error:
            self._record_failure(name, error)
            value = getattr(_null_logger(), name)
        return self.guard(value)

    def guard(self, value: Any) -> Any:
        """Return an attribute of the logger, which may be a method."""
        has_effect = callable(value) and not isinstance(value, NullExperiment) and not self._is_dropped
        return partial(self.call, value) if has_effect else value

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function. If it fails, record that."""
        name, start = getattr(function, "__name__", ""), time.monotonic()
        try:
            result = function(*args, **kwargs)
        except (Exception, SystemExit) as error:  # wandb exits as well
            self._record_failure(name, error, time.monotonic() - start)
            return NullExperiment()
        self._failures.pop(name, None)
        return result

    def get_experiment(self) -> Any:
        """Return the logger's experiment, which may take seconds to start."""
        return self.call(self._start_experiment)

    def _start_experiment(self) -> Any:
        return self._logger.experiment

    @property
    def _is_dropped(self) -> bool:
        return isinstance(self._logger, DummyLogger)

    def _record_failure(self, method: str, error: BaseException, seconds: float = 0.0) -> None:
        """Warn of the first failure of the logger, and of the one that drops it."""
        if self._is_dropped:
            return
        self._failures[method] += 1
        if self._failures[method] == MAX_FAILURES or seconds > MAX_SECONDS:
            self._logger = _null_logger()
        if self._is_dropped or not self._has_warned:
            outcome = "training continues without it" if self._is_dropped else "training continues"
            cause = str(error).strip().split("\n")[0]
            _log.warning("%s failed, and %s: %s: %s", self._option, outcome, type(error).__name__, cause)
        self._has_warned = True


def _null_logger() -> Any:
    logger = DummyLogger()
    logger._experiment = NullExperiment()
    return logger


class NullExperiment(DummyExperiment):
    """Empty experiment without effect: its attributes, items and return values are itself, so every chain works."""

    def __getattr__(self, _: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "NullExperiment":
        return self

    def __iter__(self) -> Iterator[Any]:  # without it, Python iterates over the items forever
        return iter(())

    def __len__(self) -> int:
        return 0


class _GuardedExperiment:
    """Proxy of a logger's experiment, such as a W&B run. Methods and items have the guard of the logger."""

    def __init__(self, guard: GuardedLogger) -> None:
        object.__setattr__(self, "_guard", guard)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._guard.get_experiment())

    def __getattr__(self, name: str) -> Any:
        return self._guard.guard(getattr(self._guard.get_experiment(), name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._guard.call(lambda: setattr(self._guard.get_experiment(), name, value))

    def __getitem__(self, key: Any) -> Any:
        return self._guard.call(lambda: self._guard.get_experiment()[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._guard.call(lambda: iter(self._guard.get_experiment())))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._guard.call(lambda: self._guard.get_experiment().__setitem__(key, value))
