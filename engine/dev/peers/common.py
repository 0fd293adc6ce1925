"""What the programs that `engine.dev.bench` compares share: options, networks, images, optimizer and the clock."""

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from onecurve.optim.schedules import one_cycle
from onecurve.process.devices import tune_malloc
from onecurve.random.hashing import permutation
from src.data.augment.pixels import crop_and_flip, normalize, sample_keys
from src.data.sources.cifar import CIFAR10
from src.models.mlp import mlp
from src.models.resnet9 import resnet9

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
NETS = {
    "tiny": partial(mlp, num_classes=10, image_shape=[3, 32, 32], hidden=[16]),
    "resnet9w4b32": partial(resnet9, num_classes=10, width=4),  # for a batch of 32
    "resnet9w4": partial(resnet9, num_classes=10, width=4),
    "resnet9": partial(resnet9, num_classes=10),
}


class Marks:
    """Writes number and time (`time.time()`, seconds) of the first step and of every `every`-th step."""

    def __init__(self, file: Path, every: int) -> None:
        self.file, self.every = file, every
        self.marks: list[tuple[int, float]] = []

    def step(self, number: int) -> None:
        """Record the end of step `number`; the first is 1."""
        if number == 1 or number % self.every == 0:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.marks.append((number, time.time()))
            self.file.write_text(json.dumps(self.marks))


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all programs have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=NETS, default="resnet9")
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--clock", type=Path, required=True, help="file for the times of steps")
    parser.add_argument("--batch", type=int, default=128, help="samples per step over all processes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--log-every", type=int, default=50)
    return parser


def join_process_group() -> tuple[int, int, torch.device]:
    """Join the process group if torchrun started several; return rank, world size and this rank's device."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))  # torchrun sets one
    return rank, world, torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")


def set_up(options: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor, nn.Module]:
    """Tune malloc, seed torch, and return the training images, their labels and the network on the device."""
    tune_malloc()  # as in the template: the benchmark compares the loops
    torch.manual_seed(0)
    images, labels = (tensor.to(device) for tensor in CIFAR10([]).load(options.data, "train"))
    net = NETS[options.net]().to(device, memory_format=memory_format_of(options))  # type: ignore[call-overload]
    return images, labels, net


def memory_format_of(options: argparse.Namespace) -> torch.memory_format:
    """Return channels last for convolutions."""
    return torch.contiguous_format if options.net == "tiny" else torch.channels_last


def batches_of_epoch(images: int, batch: int, epoch: int) -> Tensor:
    """Return the indices of an epoch, a batch per row."""
    order = permutation(images, 0, epoch)
    return order[: images // batch * batch].view(-1, batch)


def augmented(images: Tensor, epoch: int, index: Tensor) -> Tensor:
    """Return the (n, 3, 32, 32) images of these indices as a training step of the template gets them."""
    crops = crop_and_flip(images.index_select(0, index), sample_keys(0, epoch, index), padding=4, flip=True)
    return normalize(crops, MEAN, STD, torch.float32)


def build_optimizer(weights: list[Tensor], steps: int) -> tuple[SGD, LambdaLR]:
    """Return SGD without weight decay for vectors, and the default schedule, both as in `train.py`."""
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": 5e-4},
        {"params": [weight for weight in weights if weight.ndim <= 1]},
    ]
    optimizer = SGD(groups, 0.1, momentum=0.9, nesterov=True)
    return optimizer, LambdaLR(optimizer, lambda step: one_cycle(step, steps))
