"""What is measured: each function gives the cases of one measurement, on images in the folder that it is told."""

import csv
import os
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks.programs import Case, Program, python
from scripts.peers.nets import BATCH, OVERRIDES

STEPS = {"tiny": 2000, "resnet9w4b32": 1000, "resnet9w4": 400, "resnet9": 200, "resnet18": 40}  # of each network, timed
EVERY = {"tiny": 50, "resnet9w4b32": 100, "resnet9w4": 40, "resnet9": 20, "resnet18": 5}  # between its log points


def ours(name: str, net: str, images: Path, steps: int, every: int, *overrides: str, devices: int = 1) -> Program:
    """This template as it is used: progress bar, metrics.csv, wandb, metrics, checkpoints."""
    clock = ["_target_=scripts.peers.clock.Clock", "file={scratch}/clock.json", f"every={every}"]
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
    """A program of `scripts/peers`, told what `ours` is."""
    told = ["--net", net, "--data", images, "--clock", "{scratch}/clock.json", "--steps", steps, "--log-every", every]
    told += ["--batch", BATCH.get(net, 128)]
    return Program(name, python("-m", f"scripts.peers.{module}", *told, *options, processes=processes))


def overhead(images: Path) -> list[Case]:
    """A step on one device: by hand, in plain Lightning with each habit of the tutorials, and ours."""
    habits = {"bar": "bar", "metrics": "metrics", "images one by one": "images", "all": "bar,metrics,images"}
    cases = []
    for net in STEPS:
        told = (net, images, STEPS[net], EVERY[net])
        programs = [
            peer("hand-written", "handwritten", *told),
            peer("Lightning, barebones", "lightning_loop", *told),
            ours("this template", *told),
        ]
        if net in ("tiny", "resnet9"):
            programs += [
                peer(f"Lightning, {name}", "lightning_loop", *told, "--habits", habit) for name, habit in habits.items()
            ]
        cases.append(Case(f"a step of {net}", "step ms", programs))
    return cases


def ddp(images: Path) -> list[Case]:
    """A step of DistributedDataParallel on two processes: by hand under torchrun, and ours."""
    cases = []
    for net in STEPS:
        told = (net, images, STEPS[net], EVERY[net])
        programs = [
            peer("hand-written, torchrun", "handwritten", *told, processes=2),
            ours("this template, sync_batchnorm=false", *told, "trainer.sync_batchnorm=false", devices=2),
            ours("this template", *told, devices=2),
        ]
        cases.append(Case(f"a step of {net} on two processes", "step ms", programs))
    return cases


def data(images: Path) -> list[Case]:
    """Loader and augmentation alone, without a network."""
    told = ["--data", images, "--clock", "{scratch}/clock.json"]
    paths = {"PIL, image by image": "pil", "this template": "ours"}
    programs = [
        Program(name, python("-m", "scripts.peers.data_path", *told, "--path", path)) for name, path in paths.items()
    ]
    return [Case("a batch of 128 images", "step ms", programs)]


def startup(images: Path) -> list[Case]:
    """From the command to the end of the first step, on one process and two; and `--help`."""
    cases = []
    for processes in (1, 2):
        told = ("resnet9", images, 3, 1)
        by_hand = peer("hand-written", "handwritten", *told, processes=processes)
        by_us = [ours("this template", *told, devices=processes)]
        by_us += [ours("this template, logger=none", *told, "logger=none", devices=processes)]
        cases.append(Case(f"the first step, processes: {processes}", "first step s", [by_hand, *by_us]))
    return [*cases, Case("train.py --help", "seconds", [Program("--help", python("train.py", "--help"))])]


def accuracy(images: Path) -> list[Case]:
    """The recipe that takes minutes: accuracy on the test set, and the seconds to it. Only with --data."""
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
    "data": data,
    "startup": startup,
    "accuracy": accuracy,
}


def make_images(folder: Path) -> Path:
    """Noise in the official files of CIFAR-10: speed does not depend on what is in the images."""
    import pickle

    import numpy as np

    from src.data.sources.cifar import CIFAR10

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
