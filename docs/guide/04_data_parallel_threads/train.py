"""Chapter 4: DataParallel by hand, in one process with a thread per device, and what it copies in each step."""

import copy
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from docs.guide.experiment import BATCH, EPOCHS, batches, check_parity, chosen_bug, images, network, order, sgd

DEVICES = 3
threads = ThreadPoolExecutor(DEVICES)


def replicate(net: nn.Module, bug: str) -> nn.Module:
    """Return a copy of the network, through which gradients flow back into the weights of the original."""
    replica = copy.deepcopy(net)
    for path, weight in net.named_parameters():
        layer, _, name = path.rpartition(".")
        if bug != "deepcopy":
            delattr(replica.get_submodule(layer), name)
            setattr(replica.get_submodule(layer), name, weight.clone())
    return replica


def forward(net: nn.Module, x: Tensor, bug: str) -> Tensor:
    """Do what `torch.nn.DataParallel(net)(x)` does on several GPUs, and return the logits of all images."""
    parts = x.tensor_split(DEVICES)  # scatter
    replicas = [replicate(net, bug) for _ in parts]
    outputs = threads.map(lambda replica, part: replica(part), replicas, parts)  # parallel_apply
    return torch.cat(list(outputs))  # gather: the loss is computed by one device for all images


def epoch_batches(epoch: int, bug: str) -> Iterable[tuple[Tensor, Tensor]]:
    if bug == "ddp_sampler":  # as DistributedDataParallel needs it, where each process has its loader
        return DataLoader(images(), BATCH // DEVICES, sampler=DistributedSampler(images()))
    if bug == "batch_per_process":  # the same
        return DataLoader(images(), BATCH // DEVICES, sampler=order(epoch).tolist())
    return batches(epoch)


def train(bug: str) -> list[float]:
    net, losses = network(), []
    optimizer = sgd(net)  # there is one optimizer, for the weights of the first device
    for epoch in range(EPOCHS):
        for x, y in epoch_batches(epoch, bug):
            loss = F.cross_entropy(forward(net, x, bug), y)
            optimizer.zero_grad()
            loss.backward()  # reduce: the gradients of all replicas are added
            optimizer.step()
            losses.append(loss.item())
    return losses


def print_costs() -> None:
    """Print the bytes that the first device exchanges with the others in a step, and the milliseconds it takes."""
    net, x, others = network(), batches(0)[0][0], DEVICES - 1
    weights = sum(weight.nbytes for weight in net.parameters())
    print(f"sent: weights {others * weights:,} bytes, images {x.nbytes * others // DEVICES:,}")
    print(f"received: gradients {others * weights:,} bytes, logits {net(x).nbytes * others // DEVICES:,}")
    for name, run in {
        "one copy, forward": lambda: net(x),
        f"{DEVICES} replicas, replicate": lambda: [replicate(net, "") for _ in range(DEVICES)],
        f"{DEVICES} replicas, all of forward": lambda: forward(net, x, ""),
    }.items():
        start = time.perf_counter()
        for _ in range(20):
            run()
        print(f"{name}: {(time.perf_counter() - start) / 20 * 1000:.1f} ms")


if __name__ == "__main__":
    torch.set_num_threads(1)  # otherwise one copy computes in several threads, too
    bug = chosen_bug("deepcopy", "batch_per_process", "ddp_sampler")
    print_costs()
    check_parity(train(bug))
