"""One rank's life, whoever started its process: its log, its share of the cores, the run, and a clean end."""

import ast
import os
import re
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from src.launch.config import device_count
from src.launch.imports import uncollected
from src.launch.logs import log_to_folder
from src.launch.signals import Stopped


def run_rank(cfg: DictConfig, rank: int) -> dict[str, float]:
    """Train and test in this process; return the final metrics.

    If that fails, the process group is left for the end of the process: closing it here would fail the other ranks
    before this one has told its error, and NCCL's might wait for them.
    """
    with uncollected():
        from src.experiment import run  # late: it imports Lightning, which the process that only launches need not

    log_to_folder(cfg.run_dir, rank)
    if cfg.trainer.accelerator == "cpu" and (sharers := device_count(cfg.trainer)) > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // sharers))
    try:
        metrics = run(cfg)
    except Stopped:  # on all ranks at once
        close_process_group()
        raise
    close_process_group()
    return metrics


def close_process_group() -> None:
    """Leave the others: a gloo process that exits with its group alive may abort."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def drives_all_devices(cfg: DictConfig) -> bool:
    """Whether the strategy wants one process per node, and does the rest itself.

    Read in its source: to import it, and with it Lightning, would take the process that only launches over a second.
    """
    return _says_so(cfg.strategy._target_)


def _says_so(target: str) -> bool:
    """Whether a class, or one of this project's from which it inherits, says `single_process = True`."""
    module, _, name = target.rpartition(".")
    try:
        spec = find_spec(module)
    except ImportError:  # whoever builds it will say so
        return False
    tree = ast.parse(Path(spec.origin).read_text() if spec and spec.origin else "")
    known = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return name in known and _says_so(known[name])
    if any(re.fullmatch(r"single_process(: bool)? = True", ast.unparse(line)) for line in classes[name].body):
        return True
    bases = [known.get(base.id, f"{module}.{base.id}") for base in classes[name].bases if isinstance(base, ast.Name)]
    return any(_says_so(base) for base in bases if not base.startswith(("lightning.", "torch.")))
