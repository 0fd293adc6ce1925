"""A rank that raises, is killed or is stopped: all ranks end in time, under the own launcher and under torchrun."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import lightning as L

from scripts.gpu_check.case import NotHere, Session, expect
from scripts.gpu_check.process import TIMED_OUT, run_limited
from scripts.gpu_check.training import SHORT_PARITY, overrides

LAUNCHERS = ["own", "torchrun"]
MESSAGES = {"raise": "only on this rank", "kill": "rank 1 died", "stop": "rank 1 hangs"}  # of the own launcher
FAULT_LIMIT = 150  # seconds of a case
_TIMEOUT = 10  # launch.timeout
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
        if session.devices < 2:
            raise NotHere("needs two devices")
        fault = f"+callbacks.fault={{_target_: scripts.gpu_check.faults.Fault, kind: {kind}}}"
        options = [*SHORT_PARITY, "strategy=ddp", f"launch.timeout={_TIMEOUT}", fault]
        log = session.folder / "command.log"
        command = [*_launcher(launcher), "train.py", *overrides(session, "run", *options, devices=2)]
        code = run_limited(command, log, FAULT_LIMIT - 10)
        expect(code is not TIMED_OUT, f"the ranks did not end within {FAULT_LIMIT - 10} s")
        expect(code != 0, "the exit code is 0")
        named = MESSAGES[kind] in log.read_text(errors="replace")
        expect(named or launcher == "torchrun", f"the error does not contain {MESSAGES[kind]!r}")
        return f"exit code {code}" + ", the error names the rank" * (launcher == "own")

    return check


def _launcher(name: str) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [sys.executable, *(torchrun if name == "torchrun" else [])]
