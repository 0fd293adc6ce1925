"""Measurements on several processes: strategies, the pipeline and its ideal, the all-reduce and its bound."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from scripts.dev.benchmarks.cases import ours, peer
from scripts.dev.benchmarks.programs import ROOT, Case, Program, python
from src.strategies.pipeline.schedules import SCHEDULES
from src.strategies.pipeline.simulation import bubble, simulate

WORLDS = (1, 2, 4)
_EVEN = ("hsdp", "hybrid")  # they need two groups of processes
_ONE_GPU_EACH = ("dp",)
BATCH, TIMED, EVERY, PROFILED = 128, 40, 10, 8  # samples; steps


def strategies(images: Path) -> list[Case]:
    """Every strategy on 1, 2 and 4 processes, a batch of 128 over all: speed, memory, communication.

    `scripts/dev/peers/communication.py` reads each rank's memory and communication.
    """
    names = sorted(file.stem for file in (ROOT / "conf/strategy").glob("*.yaml"))
    programs = [
        _strategy(name, processes, images) for processes in WORLDS for name in names if _is_possible(name, processes)
    ]
    programs.sort(key=lambda program: not program.name.startswith("auto"))
    return [Case("resnet9", "samples/s", programs)]


def _is_possible(name: str, processes: int) -> bool:
    if name in _ONE_GPU_EACH:
        return torch.cuda.device_count() >= processes > 1
    return processes == 1 if name == "auto" else not (name in _EVEN and processes % 2)


def _strategy(name: str, processes: int, images: Path) -> Program:
    profiled = ["_target_=scripts.dev.peers.communication.Communication", "file={scratch}/rank"]
    profiled += [f"first={TIMED}", f"last={TIMED + PROFILED}"]
    settings = [f"strategy={name}", *(f"+callbacks.communication.{setting}" for setting in profiled)]
    program = ours(f"{name} x{processes}", "resnet9", images, TIMED + PROFILED, EVERY, *settings, devices=processes)
    program.read, program.samples = _ranks, BATCH
    return program


def _ranks(scratch: Path) -> dict[str, float]:
    """Return the mean of the ranks' percentages, and the maximum of their memory."""
    ranks = [json.loads(file.read_text()) for file in scratch.glob("rank.*.json")]
    percentages = {name: statistics.mean(rank[name] for rank in ranks) for name in ("communicating", "waiting")}
    return {"MB": max(rank["MB"] for rank in ranks)} | {f"{name} %": value for name, value in percentages.items()}


def pipeline(images: Path, stages: int = 2, microbatches: int = 8) -> list[Case]:
    """A pipeline of two processes and eight micro-batches: hand-written, ours, and the ideal of its schedule.

    The ideal takes the time of one process that computes the same micro-batches beside another, divided by the number
    of stages and by the part of a step outside the bubble.
    """
    peers = ("handwritten_pipeline", "resnet9", images, TIMED, EVERY, "--microbatches", str(microbatches))
    settings = ["strategy=pipeline", f"strategy.microbatches={microbatches}"]
    cases = []
    for name in SCHEDULES:
        fraction = 1 / stages / (1 - bubble(simulate(name, stages, microbatches)))
        hand_written = peer("hand-written, torchrun", *peers, "--schedule", name, processes=stages)
        template = ours(
            "this template", "resnet9", images, TIMED, EVERY, *settings, f"strategy.schedule={name}", devices=stages
        )
        beside = peer("one process beside another", *peers, "--schedule", "none", processes=stages)
        hand_written.ideal = template.ideal = (beside.name, fraction)
        cases.append(Case(f"a step of resnet9, {name}", "step ms", [hand_written, template, beside]))
    return cases


def allreduce(images: Path) -> list[Case]:
    """ResNet-18's gradients over 2 and 4 processes: the time, and the part of the ring's bound."""
    cases = []
    command = ["-m", "scripts.dev.peers.allreduce", "--file", "{scratch}/times.json"]
    for processes in WORLDS[1:]:
        programs = [
            Program(
                name,
                python(*command, *options, processes=processes),
                lambda scratch: json.loads((scratch / "times.json").read_text()),
            )
            for name, options in {"in one piece": [], "in buckets of 25 MB": ["--bucket-mb", "25"]}.items()
        ]
        cases.append(Case(f"44.7 MB over {processes} processes", "all-reduce ms", programs))
    return cases


BENCHMARKS: dict[str, Callable[[Path], list[Case]]] = {
    "strategies": strategies,
    "pipeline": pipeline,
    "allreduce": allreduce,
}
