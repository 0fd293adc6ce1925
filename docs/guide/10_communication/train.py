"""Chapter 10: less communication: gradients in half precision, of low rank, or none at all for some steps."""

import importlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import docs.guide.experiment as guide

powersgd = importlib.import_module("docs.guide.10_communication.powersgd")
average = powersgd.average
# How far a loss may be from that of one process, relative to it; 0 stands for rounding.
BOUNDS = {"all-reduce": 0, "float16": 1e-4, "rank 4": 0.15, "rank 32": 0, "every 4 steps": 0.02, "every step": 0}


def hook(average_one: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average the gradients of a bucket; DistributedDataParallel calls it in place of its own all-reduce."""
    for weight, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        gradient.copy_(average_one(weight, gradient))
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def float16(weight: Tensor, gradient: Tensor) -> Tensor:
    return average(gradient.half())


def float16_sum(weight: Tensor, gradient: Tensor) -> Tensor:
    half = gradient.half()
    dist.all_reduce(half)
    return half


def train(bug: str, average_one: Any = None, period: int = 0) -> list[float]:
    """Return the mean loss of each step. With a period, ranks train alone, and average their weights once in it."""
    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), []
    net: Any = guide.network() if period else DistributedDataParallel(guide.network())
    if average_one:
        net.register_comm_hook(average_one, hook)
    optimizer = guide.sgd(net)
    for epoch in range(guide.EPOCHS):
        for x, y in guide.batches(epoch):
            loss = F.cross_entropy(net(x[rank::ranks]), y[rank::ranks])
            optimizer.zero_grad()
            loss.backward()
            for weight in net.parameters() if bug == "twice" else []:
                dist.all_reduce(weight.grad)  # DistributedDataParallel has averaged it already
            optimizer.step()
            losses.append(average(loss.detach()).item())
            for weight in net.parameters() if period and len(losses) % period == 0 else []:
                weight.data = average(weight.data)
    return losses


def train_all(bug: str) -> list[list[float]]:
    """Return the losses of each variant, in the order of BOUNDS."""
    half = train("", float16_sum if bug == "division" else float16)
    low_rank = [train("", powersgd.LowRank(rank, bug != "feedback").average) for rank in (4, 32)]
    return [train(bug), half, *low_rank, train("", period=4), train("", period=1)]


if __name__ == "__main__":
    runs = guide.run_ranks(train_all, 2, guide.chosen_bug("twice", "division", "feedback"))[0]
    for (variant, bound), losses in zip(BOUNDS.items(), runs, strict=True):
        if not bound:
            print(f"{variant}:")
            guide.check_parity(losses)
            continue
        difference = max(abs(loss / other - 1) for loss, other in zip(losses, guide.train_alone(), strict=True))
        print(f"{variant}: the losses differ by up to {difference:.4%}, the last one is {losses[-1]:.3f}")
        assert difference < bound, f"{variant}: the losses differ by more than {bound:.2%}"
