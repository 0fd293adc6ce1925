"""The list of the cases: quick and telling ones first. `cases NAME RESULT ACCELERATOR DEVICES FOLDER` runs one of them.

It is the process of this case, and writes the outcome as JSON.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

from engine.dev.gpu_check.bits import PRECISIONS, bits, bits_compiled, bits_on_devices, bits_on_two_hosts
from engine.dev.gpu_check.case import Case, CheckFailedError, NotHere, Session
from engine.dev.gpu_check.faults import FAULT_LIMIT, LAUNCHERS, MESSAGES, fault_check, torchrun
from engine.dev.gpu_check.numbers import hashes
from engine.dev.gpu_check.speed import resnet18_flops, short_run, speed_of_bits, speedrun, waits
from engine.dev.gpu_check.strategies import (
    STRATEGIES,
    compiled,
    compiled_ranks,
    cpu_parity,
    data_parallel,
    strategy_check,
)
from engine.dev.gpu_check.two_hosts import shared_check
from engine.dev.shared.process import exit_on_sigterm
from onecurve.process.signals import die_with_parent

_MOST_STAGES = 4  # blocks of the default model
_BIT_EXACT = ["ddp", "fsdp", "pipeline"]


def cases(session: Session) -> list[Case]:
    """Return the cases for this many devices."""
    shared = [] if session.devices > 1 else shared_device()
    return [
        Case("short-run", short_run(1), timed=True),
        Case("hashes", hashes),
        Case("parity", cpu_parity),
        *(Case(f"bits-{precision}", bits(precision)) for precision in PRECISIONS),
        *shared,
        Case("waits", waits, 180),
        *(Case(f"{name}-x1", strategy_check(name, 1)) for name in STRATEGIES),
        Case("compile", compiled, 180),
        Case("bits-compiled", bits_compiled, 300),
        Case("speed-bits", speed_of_bits, timed=True),
        Case("speedrun", speedrun(compile=False), timed=True),
        Case("resnet18-mfu", resnet18_flops, timed=True),
        Case("speedrun-compiled", speedrun(compile=True), 240, timed=True),
        *several_devices(session.devices),
    ]


def shared_device() -> list[Case]:
    """Return the cases of two ranks on one device."""
    return [
        *(Case(f"{name}-x2-shared", shared_check(name), 180) for name in _BIT_EXACT),
        *(Case(f"bits-{name}-x2-shared", bits_on_two_hosts(name), 280) for name in _BIT_EXACT),
        *(Case(f"{name}-x2-shared", shared_check(name), 180) for name in ("hsdp", "hybrid")),
    ]


def several_devices(devices: int) -> list[Case]:
    """Return the cases for two and more devices; none for one."""
    if devices < 2:
        return []
    counts = dict.fromkeys(STRATEGIES[1:], devices) | {"pipeline": min(devices, _MOST_STAGES)}  # without `auto`
    return [
        Case(f"short-run-x{devices}", short_run(devices), timed=True),
        *(Case(f"{name}-x{count}", strategy_check(name, count), 180) for name, count in counts.items()),
        *(Case(f"bits-{name}-x2", bits_on_devices(name, 2), 180) for name in _BIT_EXACT),
        *([Case("bits-hybrid-x4", bits_on_devices("hybrid", 4), 180)] if devices > 3 else []),
        Case(f"compile-x{devices}", compiled_ranks(devices), 240),
        Case("ddp-listed", strategy_check("ddp", list(range(1, devices, 2)))),
        Case("dp", data_parallel),
        Case("torchrun", torchrun),
        *(Case(f"{kind}-{by}", fault_check(kind, by), FAULT_LIMIT) for kind in MESSAGES for by in LAUNCHERS),
    ]


def main() -> None:
    exit_on_sigterm()
    die_with_parent(os.getppid(), signal.SIGTERM)  # the check may end while threads wait for its cases
    name, result, accelerator, devices, folder = sys.argv[1:]
    session = Session(accelerator, int(devices), Path(folder))
    (case,) = [case for case in cases(session) if case.name == name]
    try:
        outcome = ("ok", case.check(session))
    except NotHere as reason:
        outcome = ("not here", str(reason))
    except CheckFailedError as error:
        outcome = ("FAILED", str(error))
    except Exception as error:
        traceback.print_exc()
        outcome = ("FAILED", f"{type(error).__name__}: {error}")
    Path(result).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
