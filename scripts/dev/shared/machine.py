"""The hardware and the versions, without which a time is meaningless."""

import os
import platform
import subprocess
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import torch

from scripts.dev.shared.process import ROOT


def describe_machine() -> dict[str, str]:
    """Return names and values: CPU, GPUs, versions and the commit."""
    rows = {
        "CPU": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "GPUs": _gpus() or "none",
        "Python": f"{platform.python_version()} on {platform.system()} {platform.release()}",
        "packages": ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "hydra-core", "wandb")),
        "commit": _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
    }
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        rows["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}, driver {driver}"
    return rows


def _gpus() -> str:
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    models = Counter(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}" for gpu in gpus)
    return " and ".join(f"{count} x {name}" for name, count in models.items())


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _output(*command: str) -> str:
    """Return the output of a command, or `unknown` where it does not exist or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
