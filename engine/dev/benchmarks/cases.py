"""The measurements; each function returns the cases of one, given the folder with CIFAR-10."""

import json
import os
import pickle
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine.dev.benchmarks.programs import Case, Program
from engine.dev.shared.process import ROOT, python
from src.data.sources.cifar import CIFAR10

OVERRIDES = {
    "tiny": ["model=mlp", "model.hidden=[16]"],
    "resnet9w4b32": ["model=resnet9", "model.width=4", "data.batch_size=32", "module.lr_scaling=none"],
    "resnet9w4": ["model=resnet9", "model.width=4"],
    "resnet9": ["model=resnet9"],
    "vit": ["model=vit"],
}
# Timed steps of each network, and steps between its log points.
STEPS = {"tiny": (2000, 50), "resnet9w4b32": (1000, 100), "resnet9w4": (400, 40), "resnet9": (200, 20)}
WORLDS = (1, 2, 4)
SHORT = (40, 10)  # steps of the measurements of several processes, likewise
PROFILED = 8  # steps
_EVEN = ("hsdp", "hybrid")  # they need two groups of processes
_ONE_GPU_EACH = ("dp",)


def ours(name: str, net: str, images: Path, length: tuple[int, int], *overrides: str, devices: int = 1) -> Program:
    """Return this template with its defaults: progress bar, metrics.csv, wandb, metrics, checkpoints.

    Args:
        length: number of steps, and of steps between log points.
    """
    steps, every = length
    clock = ["_target_=engine.dev.peers.callbacks.Clock", "file={scratch}/clock.json", f"every={every}"]
    settings = [
        *OVERRIDES[net],
        f"data.root={images}",
        f"trainer.devices={devices}",
        f"trainer.max_steps={steps}",
        "trainer.max_epochs=-1",
        f"trainer.log_every_n_steps={every}",
        "trainer.limit_val_batches=1",
        "test=false",
        "run_dir={scratch}/run",
        *(f"+callbacks.clock.{setting}" for setting in clock),
    ]
    return Program(name, python("train.py", *settings, *overrides))


def peer(
    name: str, module: str, net: str, images: Path, length: tuple[int, int], *options: object, processes: int = 1
) -> Program:
    """Return a program of `engine/dev/peers` with the settings of `ours`."""
    steps, every = length
    settings = ["--net", net, "--data", images, "--clock", "{scratch}/clock.json", "--steps", steps]
    settings += ["--log-every", every, "--batch", 32 if net == "resnet9w4b32" else 128]
    return Program(name, python("-m", f"engine.dev.peers.{module}", *settings, *options, processes=processes))


def overhead(images: Path) -> list[Case]:
    """A step on one device: hand-written, Lightning without and with what its Trainer does, and this template."""
    cases = []
    for net, length in STEPS.items():
        task = (net, images, length)
        programs = [
            peer("hand-written", "handwritten", *task),
            peer("Lightning, barebones", "lightning_loop", *task),
            peer("Lightning, defaults", "lightning_loop", *task, "--defaults"),
            ours("this template", *task),
        ]
        cases.append(Case(f"a step of {net}", "step ms", programs))
    return cases


def script(images: Path) -> list[Case]:
    """A step of a script of plain Lightning, by `lightning.Trainer` and by `onecurve.Trainer`."""
    task = ("lightning_loop", "tiny", images, STEPS["tiny"])
    programs = [
        peer("lightning.Trainer", *task, "--samples", "--defaults"),
        peer("onecurve.Trainer", *task, "--samples", "--onecurve"),
    ]
    return [Case("a step of a script", "step ms", programs)]


def ddp(images: Path) -> list[Case]:
    """A step of DistributedDataParallel on two processes: hand-written under torchrun, and this template."""
    cases = []
    for net, length in STEPS.items():
        task = (net, images, length)
        programs = [
            peer("hand-written, torchrun", "handwritten", *task, processes=2),
            ours("this template, sync_batchnorm=false", *task, "trainer.sync_batchnorm=false", devices=2),
            ours("this template", *task, devices=2),
        ]
        cases.append(Case(f"a step of {net} on two processes", "step ms", programs))
    return cases


def groups(images: Path) -> list[Case]:
    """A step of the default network with batch normalization over the groups of the batch, on 1, 2 and 4 processes."""
    kinds = {
        "statistics of a process": ["trainer.sync_batchnorm=false"],
        "four groups": [],
        "one group": ["virtual_ranks=1"],
    }
    uneven = {"shares 3:1": ["strategy=ddp", "strategy.shares=[3,1]"]}
    cases = []
    for devices in WORLDS:
        chosen = kinds | uneven if devices == 2 else kinds
        task = ("resnet9", images, STEPS["resnet9"])
        programs = [ours(name, *task, *options, devices=devices) for name, options in chosen.items()]
        cases.append(Case(f"a step of resnet9, processes: {devices}", "step ms", programs))
    return cases


def virtual_ranks(images: Path) -> list[Case]:
    """A step of the default network with its virtual ranks together, and one by one, on one process and two."""
    kinds = {
        "together": [],
        "one by one, 4": ["bit_exact=true"],
        "one by one, 8": ["bit_exact=true", "virtual_ranks=8"],
    }
    cases = []
    for devices in (1, 2):
        programs = [_profiled(name, devices, images, *options) for name, options in kinds.items()]
        cases.append(Case(f"a step of resnet9, processes: {devices}", "step ms", programs))
    return cases


def recomputation(images: Path) -> list[Case]:
    """A step of the vision transformer with all activations kept, and with those of each block computed again."""
    programs = [
        ours(f"module.recompute={kind}", "vit", images, (6, 2), f"module.recompute={kind}")
        for kind in ("none", "blocks")
    ]
    return [Case("a step of vit", "step ms", programs)]


def data(images: Path) -> list[Case]:
    """Loader and augmentation alone, without a network."""
    settings = ["--data", images, "--clock", "{scratch}/clock.json"]
    paths = {"PIL, image by image": "pil", "this template": "ours"}
    programs = [
        Program(name, python("-m", "engine.dev.peers.data_path", *settings, "--path", path))
        for name, path in paths.items()
    ]
    return [Case("a batch of 128 images", "step ms", programs)]


def startup(images: Path) -> list[Case]:
    """From the command to the end of the first step, on one process and two; and `--help`."""
    cases = []
    for processes in (1, 2):
        task = ("resnet9", images, (3, 1))
        programs = [peer("hand-written", "handwritten", *task, processes=processes)]
        programs += [ours("this template", *task, devices=processes)]
        programs += [ours("this template, logger=none", *task, "logger=none", devices=processes)]
        cases.append(Case(f"the first step, processes: {processes}", "first step s", programs))
    return [*cases, Case("train.py --help", "seconds", [Program("--help", python("train.py", "--help"))])]


def strategies(images: Path) -> list[Case]:
    """Every strategy on 1, 2 and 4 processes, a batch of 128 over all: speed, memory, communication.

    `engine/dev/peers/callbacks.py` reads each rank's memory and communication.
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
    return _profiled(f"{name} x{processes}", processes, images, f"strategy={name}")


def _profiled(name: str, processes: int, images: Path, *options: str) -> Program:
    """Return a program that trains the default network; it reads memory, processor time and communication."""
    timed, every = SHORT
    last = timed + PROFILED
    profiled = ["_target_=engine.dev.peers.callbacks.Communication", "file={scratch}/rank"]
    profiled += [f"first={timed}", f"last={last}"]
    settings = [*options, *(f"+callbacks.communication.{setting}" for setting in profiled)]
    program = ours(name, "resnet9", images, (last, every), *settings, devices=processes)
    program.read, program.samples = _read_ranks, 128
    return program


def _read_ranks(scratch: Path) -> dict[str, float]:
    """Return the maximum of the ranks' memory, and the means of their processor times and percentages."""
    ranks = [json.loads(file.read_text()) for file in scratch.glob("rank.*.json")]
    means = {name: statistics.mean(rank[name] for rank in ranks) for name in ("CPU ms", "communicating")}
    return {
        "MB": max(rank["MB"] for rank in ranks),
        "CPU ms": means["CPU ms"],
        "communicating %": means["communicating"],
    }


def pipeline(images: Path, microbatches: int = 8) -> list[Case]:
    """A pipeline of two processes and eight micro-batches: hand-written and ours."""
    task = ("resnet9", images, SHORT)
    settings = ["strategy=pipeline", "strategy.split=[layer2]", f"strategy.microbatches={microbatches}"]
    same = [f"virtual_ranks={microbatches}", "module.channels_last=false"]
    programs = [
        peer("hand-written, torchrun", "handwritten_pipeline", *task, processes=2),
        ours("this template", *task, *settings, *same, devices=2),
    ]
    return [Case("a step of resnet9, 1f1b", "step ms", programs)]


BENCHMARKS: dict[str, Callable[[Path], list[Case]]] = {
    "overhead": overhead,
    "script": script,
    "ddp": ddp,
    "groups": groups,
    "virtual_ranks": virtual_ranks,
    "recomputation": recomputation,
    "data": data,
    "startup": startup,
    "strategies": strategies,
    "pipeline": pipeline,
}


def make_images(folder: Path) -> Path:
    """Write noise in the format of CIFAR-10's files: speed does not depend on the content of the images."""
    rng = np.random.default_rng(0)
    files = folder / CIFAR10.archive.folder
    files.mkdir(parents=True, exist_ok=True)
    for name in (name for names in CIFAR10.members.values() for name in names):
        batch = {
            b"data": rng.integers(0, 256, (10000, 3072), dtype=np.uint8),
            b"labels": [n % 10 for n in range(10000)],
        }
        temporary = files / f"{name}.{os.getpid()}"
        temporary.write_bytes(pickle.dumps(batch))
        temporary.replace(files / name)
    return folder
