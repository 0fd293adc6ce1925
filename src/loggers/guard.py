"""Guard of the configured loggers: the failure of a logger never ends a training run."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from lightning.pytorch.loggers.logger import DummyExperiment, DummyLogger, Logger
from lightning.pytorch.utilities import rank_zero_only

_log = logging.getLogger(__name__)


class GuardedLogger:
    """Proxy of a logger. If a call fails, a warning says so, and from then on all calls do nothing.

    Callbacks find a logger by its class, so `isinstance` reports the class of that logger. `experiment` is a proxy as
    well, which gets the real object at its first use. Lightning asks for it when a run starts, and would wait for it.
    """

    def __init__(self, logger: Logger) -> None:
        self._type, self._logger = type(logger), cast(Any, logger)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._type

    def __reduce__(self) -> Any:
        return GuardedLogger, (self._logger,)

    def __getattr__(self, name: str) -> Any:
        if name == "experiment" and hasattr(self._type, name):
            return NullExperiment() if rank_zero_only.rank > 0 else _GuardedExperiment(self)
        try:
            value = getattr(self._logger, name)
        except AttributeError:  # `hasattr` asks for an attribute that does not exist
            raise
        except Exception as error:
            self._drop(error)
            value = getattr(self._logger, name)
        return self.guard(value)

    def guard(self, value: Any) -> Any:
        """Return an attribute of the logger, which may be a method."""
        return partial(self.call, value) if callable(value) and not self._is_dropped else value

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function. If it fails, drop the logger."""
        try:
            return function(*args, **kwargs)
        except (Exception, SystemExit) as error:  # wandb exits as well
            self._drop(error)
            return NullExperiment()

    def get_experiment(self) -> Any:
        """Return the logger's experiment, which may take seconds to start."""
        return self.call(lambda: self._logger.experiment)

    @property
    def _is_dropped(self) -> bool:
        return isinstance(self._logger, DummyLogger)

    def _drop(self, error: BaseException) -> None:
        if self._is_dropped:
            return
        self._logger = DummyLogger()
        self._logger._experiment = NullExperiment()
        cause = str(error).strip().split("\n")[0]
        name, kind = self._type.__name__, type(error).__name__
        _log.warning("%s failed, and training continues without it: %s: %s", name, kind, cause)


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
