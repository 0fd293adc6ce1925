"""A rank that raises, is killed or is stopped: all ranks end in time, under the own launcher and under torchrun."""

import os
import signal
from collections.abc import Callable
from typing import Any

import lightning as L

from engine.dev.gpu_check.case import CheckFailedError, Session, expect
from engine.dev.gpu_check.runs import SHORT_PARITY, overrides
from engine.dev.shared.process import TIMED_OUT, python, run_limited

LAUNCHERS = ["own", "torchrun"]
MESSAGES = {"raise": "only on this rank", "kill": "rank 1 died", "stop": "rank 1:\nno stack"}  # of the own launcher
FAULT_LIMIT = 180  # seconds of a case
_TIMEOUT = 30  # launch.timeout; the first step on a GPU takes some seconds
_EXIT = 120  # seconds in which all ranks must have ended
_STEP = 3


class Fault(L.Callback):
    """Raise, kill or stop the process of rank one before its fourth step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank != 1 or trainer.global_step != _STEP:
            return
        if self.kind == "raise":
            raise RuntimeError(MESSAGES["raise"])
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


def fault_check(kind: str, launcher: str) -> Callable[[Session], str]:
    """Return the check that a run with this fault ends in time, with an error that names it."""

    def check(session: Session) -> str:
        fault = f"+callbacks.fault={{_target_: engine.dev.gpu_check.faults.Fault, kind: {kind}}}"
        code, output = _train(session, launcher, f"launch.timeout={_TIMEOUT}", fault)
        expect(code != 0, "the exit code is 0")
        named = MESSAGES[kind] in output
        expect(named or launcher == "torchrun", f"the error does not contain {MESSAGES[kind]!r}")
        return f"exit code {code}" + ", the error names the rank" * (launcher == "own")

    return check


def torchrun(session: Session) -> str:
    """Train two ranks that torchrun started."""
    code, output = _train(session, "torchrun")
    expect(code == 0, f"the exit code is {code}")
    expect("done: " in output, "the output has no line of the end")
    return "exit code 0"


def _train(session: Session, launcher: str, *options: str) -> tuple[int, str]:
    """Train two ranks by the command line; return exit code and output."""
    log = session.folder / "command.log"
    words = overrides(session, "run", *SHORT_PARITY, "strategy=ddp", *options, devices=2)
    code = run_limited(python("train.py", *words, processes=2 if launcher == "torchrun" else 1), log, _EXIT)
    if code is TIMED_OUT:
        raise CheckFailedError(f"the ranks did not end within {_EXIT} s")
    return code, log.read_text(errors="replace")
