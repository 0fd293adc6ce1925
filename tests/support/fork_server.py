"""Processes that a launcher spawns start from the fork server of the pool, which has imported torch and Lightning.

A spawned process imports them anew, in four seconds. The environment of this process is handed on as by a spawn. What
these processes print goes where the fork server prints. `python -m tests.support.fork_server` is train.py with such
ranks.
"""

import contextlib
import multiprocessing.context
import os
import runpy
import signal
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext
from typing import Any

PRELOADED = ["lightning.pytorch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "hydra"]
PRELOADED += ["onecurve.run.experiment", "tests.support.runs"]


class _Process(ForkServerProcess):
    """A process with the environment that its parent had at the start."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        from onecurve.process import signals

        os.environ.clear()
        os.environ.update(self._environment)
        die_with_parent = signals.die_with_parent

        def die_with_fork_server(parent: int, number: int = signal.SIGKILL) -> None:
            die_with_parent(os.getppid(), number)

        signals.die_with_parent = die_with_fork_server
        super().run()


class _Context(ForkServerContext):
    Process = _Process


def spawn_from_fork_server() -> None:
    """Let the start method `spawn` of this process fork the fork server."""
    context = _Context()
    context.set_forkserver_preload(PRELOADED)
    _contexts()["spawn"] = context


@contextlib.contextmanager
def new_interpreters() -> Iterator[None]:
    """Let the start method `spawn` start interpreters, as outside of tests."""
    context, _contexts()["spawn"] = _contexts()["spawn"], SpawnContext()
    try:
        yield
    finally:
        _contexts()["spawn"] = context


def _contexts() -> dict[str, Any]:
    return vars(multiprocessing.context)["_concrete_contexts"]


if __name__ == "__main__":
    from tests.support import fork_server  # as a module of which a new process finds the classes

    fork_server.spawn_from_fork_server()
    runpy.run_path("train.py", run_name="__main__")
