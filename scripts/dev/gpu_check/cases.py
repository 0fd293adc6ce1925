"""The list of the cases: quick and telling ones first."""

from scripts.dev.gpu_check.case import Case, Session
from scripts.dev.gpu_check.faults import FAULT_LIMIT, LAUNCHERS, MESSAGES, fault_check, torchrun
from scripts.dev.gpu_check.numbers import hashes
from scripts.dev.gpu_check.speed import resnet18_flops, short_run, speedrun, waits
from scripts.dev.gpu_check.strategies import (
    STRATEGIES,
    compiled,
    cpu_parity,
    data_parallel,
    device_counts,
    strategy_check,
)


def cases(session: Session) -> list[Case]:
    """Return the cases for this many devices."""
    found = [
        Case("short-run", short_run(1)),
        Case("hashes", hashes),
        Case("parity", cpu_parity),
        Case("waits", waits, 180),
        *(Case(f"{name}-x1", strategy_check(name, 1)) for name in STRATEGIES),
        Case("compile", compiled, 180),
        Case("resnet18-mfu", resnet18_flops),
        Case("speedrun", speedrun(compile=False)),
        Case("speedrun-compiled", speedrun(compile=True), 240),
    ]
    return found + several_devices(session.devices)


def several_devices(devices: int) -> list[Case]:
    """Return the cases for two and more devices; none for one."""
    if devices < 2:
        return []
    counts = {name: device_counts(name, devices) for name in STRATEGIES if name != "auto"}
    return [
        Case(f"short-run-x{devices}", short_run(devices)),
        *(Case(f"{name}-x{count}", strategy_check(name, count), 180) for name, count in counts.items()),
        Case("ddp-listed", strategy_check("ddp", list(range(1, devices, 2)))),
        Case("dp", data_parallel),
        Case("torchrun", torchrun),
        *(Case(f"{kind}-{by}", fault_check(kind, by), FAULT_LIMIT) for kind in MESSAGES for by in LAUNCHERS),
    ]
