"""Shutdown of a process that Lightning has spawned."""

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from src.strategies.ddp_spawn import DDPSpawn
from src.utils import signals
from src.utils.signals import Stopped


class Logger:
    def __init__(self) -> None:
        self.messages: list[str] = []

    def finalize(self, status: str) -> None:
        self.messages.append(status)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), Stopped(15), KeyboardInterrupt()])
def test_loggers_of_a_failed_run_are_marked_failed(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning itself finalizes only the loggers of the parent process, which have no run."""

    def fail(*_: Any) -> None:
        raise error

    strategy, logger = DDPSpawn(), Logger()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=0))
    monkeypatch.setattr(signals, "prepare_started_process", lambda parent: None)
    strategy._configure_launcher()
    monkeypatch.setattr(_MultiProcessingLauncher, "_wrapping_function", fail)
    with pytest.raises(type(error)):
        strategy.launcher._wrapping_function(0, SimpleNamespace(loggers=[logger]))
    assert logger.messages == ["failed"]
