"""Measurements on one or two processes; each function returns the cases of one, given the folder with CIFAR-10."""

import csv
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scripts.dev.benchmarks.programs import Case, Program, python
from scripts.dev.peers.nets import BATCH, OVERRIDES
from src.data.sources.cifar import CIFAR10

# Timed steps of each network, and steps between its log points.
STEPS = {
    "tiny": 2000,
    "resnet9w4b32": 1000,
    "resnet9w4": 400,
    "resnet9": 200,
    "resnet18": 40,
}
EVERY = {"tiny": 50, "resnet9w4b32": 100, "resnet9w4": 40, "resnet9": 20, "resnet18": 5}


def ours(name: str, net: str, images: Path, steps: int, every: int, *overrides: str, devices: int = 1) -> Program:
    """Return this template with its defaults: progress bar, metrics.csv, wandb, metrics, checkpoints."""
    clock = ["_target_=scripts.dev.peers.clock.Clock", "file={scratch}/clock.json", f"every={every}"]
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
    name: str, module: str, net: str, images: Path, steps: int, every: int, *options: str, processes: int = 1
) -> Program:
    """Return a program of `scripts/dev/peers` with the settings of `ours`."""
    settings = ["--net", net, "--data", images, "--clock", "{scratch}/clock.json", "--steps", steps]
    settings += ["--log-every", every, "--batch", BATCH.get(net, 128)]
    return Program(name, python("-m", f"scripts.dev.peers.{module}", *settings, *options, processes=processes))


def overhead(images: Path) -> list[Case]:
    """A step on one device: hand-written, plain Lightning with each habit of tutorials, and this template."""
    habits = {"bar": "bar", "metrics": "metrics", "images one by one": "images", "all": "bar,metrics,images"}
    cases = []
    for net in STEPS:
        task = (net, images, STEPS[net], EVERY[net])
        programs = [
            peer("hand-written", "handwritten", *task),
            peer("Lightning, barebones", "lightning_loop", *task),
            ours("this template", *task),
        ]
        if net in ("tiny", "resnet9"):
            programs += [
                peer(f"Lightning, {name}", "lightning_loop", *task, "--habits", habit) for name, habit in habits.items()
            ]
        cases.append(Case(f"a step of {net}", "step ms", programs))
    return cases


def ddp(images: Path) -> list[Case]:
    """A step of DistributedDataParallel on two processes: hand-written under torchrun, and this template."""
    cases = []
    for net in STEPS:
        task = (net, images, STEPS[net], EVERY[net])
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
        "one group": ["data.norm_groups=1"],
    }
    uneven = {"shares 3:1": ["strategy=ddp", "strategy.shares=[3,1]"]}
    cases = []
    for devices in (1, 2, 4):
        task = ("resnet9", images, STEPS["resnet9"], EVERY["resnet9"])
        chosen = kinds | uneven if devices == 2 else kinds
        programs = [ours(name, *task, *options, devices=devices) for name, options in chosen.items()]
        cases.append(Case(f"a step of resnet9, processes: {devices}", "step ms", programs))
    return cases


def data(images: Path) -> list[Case]:
    """Loader and augmentation alone, without a network."""
    settings = ["--data", images, "--clock", "{scratch}/clock.json"]
    paths = {"PIL, image by image": "pil", "this template": "ours"}
    programs = [
        Program(name, python("-m", "scripts.dev.peers.data_path", *settings, "--path", path))
        for name, path in paths.items()
    ]
    return [Case("a batch of 128 images", "step ms", programs)]


def startup(images: Path) -> list[Case]:
    """From the command to the end of the first step, on one process and two; and `--help`."""
    cases = []
    for processes in (1, 2):
        task = ("resnet9", images, 3, 1)
        programs = [peer("hand-written", "handwritten", *task, processes=processes)]
        programs += [ours("this template", *task, devices=processes)]
        programs += [ours("this template, logger=none", *task, "logger=none", devices=processes)]
        cases.append(Case(f"the first step, processes: {processes}", "first step s", programs))
    return [*cases, Case("train.py --help", "seconds", [Program("--help", python("train.py", "--help"))])]


def accuracy(images: Path) -> list[Case]:
    """The recipe of some minutes: its test accuracy, and the seconds that it takes. Only with --data."""
    quiet = [f"data.root={images}", "run_dir={scratch}/run", "logger=none"]
    program = Program("speedrun", python("train.py", "experiment=speedrun", *quiet), _accuracies)
    return [Case("to the end of the recipe", "seconds", [program])]


def _accuracies(scratch: Path) -> dict[str, float]:
    with (scratch / "run/metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    return {name: float(value) for name, value in rows[-1].items() if name.startswith("test/acc") and value}


BENCHMARKS: dict[str, Callable[[Path], list[Case]]] = {
    "overhead": overhead,
    "ddp": ddp,
    "groups": groups,
    "data": data,
    "startup": startup,
    "accuracy": accuracy,
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
