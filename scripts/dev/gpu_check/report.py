"""The report: hardware, versions and a row per case, in Markdown."""

import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from scripts.dev.gpu_check.process import ROOT
from src.utils.files import atomic_write

_DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
_LONGEST = 160  # characters of a cell


class Outcome(NamedTuple):
    """The outcome of a case: its verdict is `ok`, `FAILED` or `not here`."""

    name: str
    verdict: str
    seconds: float
    figure: str


def markdown(outcomes: list[Outcome], hardware: dict[str, str]) -> str:
    """Return the page; FAILED stands out in it."""
    command = shlex.join(["python", "-m", "scripts.dev.gpu_check", *sys.argv[1:]])
    counts = Counter(outcome.verdict for outcome in outcomes)
    lines = [
        "# GPU check",
        "",
        f"Written by `{command}` on {date.today()}: "
        + ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        + ". [Cases](gpu-check.md) explains the cases.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in hardware.items()),
        "",
        "| case | verdict | seconds | figure |",
        "| --- | --- | --- | --- |",
        *(_row(outcome) for outcome in outcomes),
    ]
    return "\n".join(lines) + "\n"


def _row(outcome: Outcome) -> str:
    verdict = f"**{outcome.verdict}**" if outcome.verdict == "FAILED" else outcome.verdict
    figure = " ".join(outcome.figure.split()).replace("|", "\\|")
    shown = figure if len(figure) <= _LONGEST else figure[: _LONGEST - 3] + "..."
    return f"| {outcome.name} | {verdict} | {outcome.seconds:.0f} | {shown} |"


def write(text: str, file: Path) -> None:
    """Write the page to the file at once, so that a stop leaves a complete one."""
    with atomic_write(file) as temporary:
        temporary.write_text(text)


def machine(on_gpu: bool) -> dict[str, str]:
    """Return the hardware and the versions, without which a figure is meaningless."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "torchmetrics", "hydra-core"))
    rows = {
        "GPUs": _gpus() if on_gpu else "none used: exercised on a CPU",
        "CPU": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "Python": f"{platform.python_version()} on {platform.system()} {platform.release()}",
        "packages": packages,
        "commit": _output(["git", "describe", "--always", "--dirty", "--abbrev=12"]),
    }
    if on_gpu:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        cudnn, driver = torch.backends.cudnn.version(), _output(_DRIVER).partition("\n")[0]
        rows["CUDA"] = f"{torch.version.cuda}, cuDNN {cudnn}, NCCL {nccl}, driver {driver}"
    return rows


def _gpus() -> str:
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    models = Counter(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}" for gpu in gpus)
    return " and ".join(f"{count} x {name}" for name, count in models.items())


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _output(command: list[str]) -> str:
    """Return the output of a command, or `unknown` where it does not exist or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
