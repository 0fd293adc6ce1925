"""Run cases, each in a process of its own: a fork of this one, so that all share its imports."""

import logging
import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from scripts.dev.dry_gpu.cases import DATA, Case
from scripts.dev.dry_gpu.run import Result, dry_run
from src.data.sources.shapes import Shapes

_PROCESSES = 2
_TIMEOUT = 300  # seconds for a case; most take three


def run_cases(cases: Sequence[Case]) -> Iterator[tuple[Case, Result]]:
    """Yield each case with its result, in their order."""
    torch.set_num_threads(1)  # a fork may not have threads
    with tempfile.TemporaryDirectory(prefix="dry_gpu_") as folder:
        Shapes(**DATA).prepare(Path(folder))
        with multiprocessing.get_context("fork").Pool(_PROCESSES, maxtasksperchild=1) as pool:
            pending = [(case, pool.apply_async(_run, (case, Path(folder)))) for case in cases]
            for case, result in pending:
                result.wait(_TIMEOUT)  # in vain if the process has crashed
                yield case, result.get() if result.ready() else Result(error=f"no result in {_TIMEOUT} seconds")


def _run(case: Case, folder: Path) -> Result:
    """Run a case in this process; the result contains its error."""
    warnings.simplefilter("ignore")
    logging.disable()
    run_dir = folder / case.title.replace(" ", "_").replace(",", "")
    try:
        return dry_run(case, [f"data.root={folder}"], run_dir)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-8:]
        lines = [f"  {frame.filename}:{frame.lineno}: {frame.line}" for frame in frames]
        return Result(error="\n".join([f"{type(error).__name__}: {error}", *lines]))
