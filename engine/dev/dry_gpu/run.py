"""Dry runs: the configured `trainer.fit` on fake CUDA tensors, as one rank of a fake process group.

Each is in a process of its own, a fork of this one, so that all share its imports.
"""

import logging
import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig, OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.dev.dry_gpu.cases import DATA, DEVICES, Case
from engine.dev.dry_gpu.compiler import describe_graphs, install_compiler
from engine.dev.dry_gpu.device import install_device
from engine.dev.dry_gpu.distributed import start_process_group
from engine.dev.dry_gpu.measure import StepCounter
from engine.dev.dry_gpu.synchronizations import SYNCHRONIZATIONS
from engine.dev.dry_gpu.tensors import install_tensors
from onecurve.notebook import compose
from onecurve.records.files import CHECKPOINTS, LAST
from onecurve.run.experiment import assemble
from onecurve.targets import drop_replaced_options
from src.data.sources.shapes import Shapes

_PROCESSES = 2
_TIMEOUT = 300  # seconds for a case; most take three
# Steps 3 and 5 are between two log points.
_SHORT = ["logger=none", "trainer.enable_progress_bar=false", "trainer.log_every_n_steps=2", "trainer.max_steps=6"]


@dataclass
class Result:
    """What a dry run found.

    Attributes:
        operations: operations of a step between two log points, by phase and name.
        collectives: collectives of that step by kind, bytes and ranks.
        synchronizations: number of host-device synchronizations in all these steps, by kind and lines of code.
        steps: number of these steps.
        at_log_point: number of synchronizations in the last step with a log point, likewise.
        compiled: captured operations, graphs and graph breaks of torch.compile.
        error: the exception that ended the run, or None.
    """

    operations: dict[str, dict[str, int]] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    synchronizations: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    at_log_point: dict[str, int] = field(default_factory=dict)
    compiled: str = ""
    error: str | None = None


class EnterFakeTensors(L.Callback):
    """Makes all tensors fake from the setup of the run on; the process group and the data are real before it."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


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


def dry_run(case: Case, overrides: list[str], folder: Path) -> Result:
    """Train for six steps as one rank of a world. The process is of no other use afterwards."""
    install_device(current=case.rank % DEVICES)
    install_tensors()
    install_compiler()
    if case.has_process_group:
        start_process_group(case.rank, case.world)
    settings = [*_SHORT, "trainer.accelerator=cuda", *overrides, *case.settings()]
    counter = _fit(_resolve(folder, *settings))
    if case.resumes:
        SYNCHRONIZATIONS.found.clear()
        last = folder / CHECKPOINTS / LAST
        counter = _fit(_resolve(folder, *settings, "trainer.max_steps=12"), last)
    assert counter.steps, "no step is between two log points"
    operations = {phase: dict(names) for phase, names in counter.operations.items()}
    return Result(
        operations,
        dict(counter.collectives),
        SYNCHRONIZATIONS.found,
        counter.steps,
        counter.at_log_point,
        describe_graphs(),
    )


def _fit(cfg: DictConfig, ckpt_path: Path | None = None) -> StepCounter:
    """Train as configured, on fake tensors."""
    trainer, module, data = assemble(cfg)
    counter = StepCounter()
    with ExitStack() as stack:
        trainer.callbacks[:0] = [EnterFakeTensors(stack)]
        trainer.callbacks.append(counter)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return counter


def _resolve(folder: Path, *overrides: str) -> DictConfig:
    """Return the configuration as the launcher passes it to the ranks."""
    cfg: Any = compose(*overrides).copy()
    OmegaConf.set_readonly(cfg, False)
    cfg.run_dir, cfg.runtime.run_id = str(folder), folder.name
    drop_replaced_options(cfg, list(overrides))
    OmegaConf.resolve(cfg)
    return cfg
