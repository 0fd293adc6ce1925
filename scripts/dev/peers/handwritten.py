"""A hand-written training loop for `scripts.dev.bench`: no Lightning, no Hydra, the same work per step.

It has the network, images, order, augmentation, optimizer, schedule and log points of `train.py`, in float32. On
several processes (`torchrun --nproc-per-node=N -m scripts.dev.peers.handwritten ...`) it uses DistributedDataParallel.
There is no host-device synchronization between log points.
"""

import argparse
import csv
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from scripts.dev.peers.marks import Marks
from scripts.dev.peers.nets import LAYOUT, NETS
from src.data.augment.pixels import crop_and_flip, normalize, sample_keys
from src.data.hashing import permutation
from src.data.sources.cifar import CIFAR10
from src.optim.schedules import one_cycle
from src.utils.malloc import tune_malloc
from src.utils.process_group import close_process_group

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]


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


def batches_of_epoch(images: int, batch: int, epoch: int) -> Tensor:
    """Return the indices of an epoch, a batch per row."""
    order = permutation(images, 0, epoch)
    return order[: images // batch * batch].view(-1, batch)


def memory_format_of(options: argparse.Namespace) -> torch.memory_format:
    return LAYOUT.get(options.net, torch.channels_last)


def build_optimizer(weights: list[Tensor], steps: int) -> tuple[SGD, LambdaLR]:
    """Return SGD without weight decay for vectors, and the default schedule, both as in `train.py`."""
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": 5e-4},
        {"params": [weight for weight in weights if weight.ndim <= 1]},
    ]
    optimizer = SGD(groups, 0.1, momentum=0.9, nesterov=True)
    return optimizer, LambdaLR(optimizer, lambda step: one_cycle(step, steps))


def main() -> None:
    options = arguments(__doc__).parse_args()
    marks = Marks(options.clock, options.log_every)
    rank, world, device = join_process_group()
    images, labels, net = set_up(options, device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True) if world > 1 else net
    optimizer, schedule = build_optimizer(list(model.parameters()), options.steps)
    layout = memory_format_of(options)
    rows, step = csv.writer(options.clock.with_suffix(".csv").open("w")), 0
    for epoch in range(options.steps):
        batches = batches_of_epoch(len(labels), options.batch, epoch).to(device)[:, rank::world]
        for index in batches:
            crops = crop_and_flip(images.index_select(0, index), sample_keys(0, epoch, index), padding=4, flip=True)
            image = normalize(crops, MEAN, STD, torch.float32).contiguous(memory_format=layout)
            loss = F.cross_entropy(model(image), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % options.log_every == 0:
                mean = loss.detach()
                if world > 1:
                    dist.all_reduce(mean)
                rows.writerow([step, float(mean) / world])
            if rank == 0:
                marks.step(step)
            if step == options.steps:
                close_process_group()
                return


if __name__ == "__main__":
    main()
