"""Worker processes that live through the test session, since each takes seconds to start.

A job runs on as many workers as its world has ranks, with the variables of a launcher. Process group and variables are
removed after it.
"""

import faulthandler
import logging
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from onecurve.process.fork_server import PRELOADED

_PRELOADED = ["torch.distributed.fsdp", "torch.distributed.pipelining", "hydra", "tests.support.runs"]
_TIMEOUT = 240.0  # seconds for one job; then all ranks are killed
_GRACE = 20.0  # seconds for the other ranks once one has failed


class RankFailed(Exception):
    """A rank raised; the message is its traceback."""


class Pool:
    """Ranks 0 to `size - 1`, each started when a job first needs it."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what `job(*args)` returns on each rank of a new world.

        Raises:
            RankFailed: if any rank raised, or did not answer in time.
        """
        self._start(world_size)
        # This process keeps the port bound, as the agent of torchrun does, so that no other program takes it.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(world_size):
            self._ranks[rank][1].send((job, args, _environment(rank, world_size, store.port)))
        answers: dict[int, tuple[bool, Any]] = {}
        while self._ranks and len(answers) < world_size:
            has_failed = any(not ok for ok, _ in answers.values())
            rank = self._next_rank(set(range(world_size)) - answers.keys(), _GRACE if has_failed else _TIMEOUT)
            answers[rank] = self._answer(rank)
        if errors := [error for _, (ok, error) in sorted(answers.items()) if not ok]:
            raise RankFailed("\n".join(errors))
        return [answers[rank][1] for rank in range(world_size)]

    def stop(self) -> None:
        """Kill all ranks."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
            _stacks(process.pid).unlink(missing_ok=True)
        self._ranks = []

    def _start(self, count: int) -> None:
        if not all(process.is_alive() for process, _ in self._ranks):
            self.stop()
        context = mp.get_context("forkserver")  # imports once what each rank needs, in a process without threads
        context.set_forkserver_preload([*PRELOADED, *_PRELOADED])
        while len(self._ranks) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,))
            process.start()
            self._ranks.append((process, ours))

    def _next_rank(self, ranks: Collection[int], timeout: float) -> int:
        """Return the first of these ranks that answers or dies: a rank that fails may leave others waiting for it."""
        handles = {handle: rank for rank in ranks for handle in (self._ranks[rank][1], self._ranks[rank][0].sentinel)}
        ready = mp.connection.wait(list(handles), timeout)
        return handles[ready[0]] if ready else min(ranks)

    def _answer(self, rank: int) -> tuple[bool, Any]:
        process, connection = self._ranks[rank]
        try:
            if connection.poll():
                return connection.recv()
        except EOFError:  # it has died
            process.join()
        state = f"timed out: {_stacks_of(process)}" if process.is_alive() else f"died: exit code {process.exitcode}"
        self.stop()  # the state of the other ranks is unknown
        return False, f"rank {rank} {state}"


def _stacks(pid: int | None) -> Path:
    return Path(tempfile.gettempdir(), f"stacks-of-{pid}.txt")


def _stacks_of(process: Any) -> str:
    """Return the stacks of the threads of a rank."""
    os.kill(process.pid, signal.SIGUSR2)
    time.sleep(1)  # faulthandler writes them in the rank
    return _stacks(process.pid).read_text() if _stacks(process.pid).exists() else "before its first job"


def _serve(connection: Connection) -> None:
    faulthandler.register(signal.SIGUSR2, _stacks(os.getpid()).open("w"))
    import torch

    from onecurve.process.groups import close_process_group
    from tests.support.memory import prepare_for_many_tests, release_memory

    prepare_for_many_tests()
    torch.set_num_threads(1)
    logging.getLogger("lightning").setLevel(logging.WARNING)
    while True:
        job, args, variables = connection.recv()
        os.environ.update(variables)
        try:
            connection.send((True, job(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        finally:
            close_process_group()
            for name in variables:
                os.environ.pop(name, None)
            del args  # a callback may hold the trainer, which could not be released later
            release_memory()


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    others = {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: str(value) for name, value in (numbers | others | agent).items()}
