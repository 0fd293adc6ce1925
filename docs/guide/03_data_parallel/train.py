"""Chapter 3: data parallelism by hand, first with one all-reduce per tensor, then in buckets during backward."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from docs.guide.experiment import EPOCHS, batches, check_parity, chosen_bug, network, run_ranks, sgd

BUCKET_BYTES = 20_000  # DDP has 25 MiB by default


def average(tensors: list[Any], bug: str = "") -> None:
    """Replace tensors by their means over the ranks, with one all-reduce for all of them."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    if bug != "sum":
        flat /= dist.get_world_size()
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def average_in_buckets(net: nn.Module) -> None:
    """Average a bucket of gradients as soon as backward has them all, while it goes on with the earlier layers."""
    buckets: list[list[nn.Parameter]] = [[]]
    for weight in reversed(list(net.parameters())):  # backward reaches the last layer first
        if sum(member.nbytes for member in buckets[-1]) + weight.nbytes > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(weight)
    for bucket in buckets:
        ready: list[nn.Parameter] = []

        def count(weight: nn.Parameter, bucket: list[nn.Parameter] = bucket, ready: list[Any] = ready) -> None:
            ready.append(weight)
            if len(ready) == len(bucket):
                average([member.grad for member in bucket])
                ready.clear()

        for weight in bucket:
            weight.register_post_accumulate_grad_hook(count)


def train(variant: str, bug: str) -> list[float]:
    """Train this rank's part of each batch, and return the loss of each step, averaged over the ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net, losses = network(), []
    optimizer = sgd(net)
    if variant == "in buckets":
        average_in_buckets(net)
    for epoch in range(EPOCHS):
        for x, y in batches(epoch):
            loss = F.cross_entropy(net(x[rank::ranks]), y[rank::ranks])
            optimizer.zero_grad()
            loss.backward()
            if bug == "parameters":
                average([weight.data for weight in net.parameters()])
            elif variant == "after backward" and bug != "never":
                average([weight.grad for weight in net.parameters()], bug)
            optimizer.step()
            mean_loss = loss.detach() / ranks
            dist.all_reduce(mean_loss)
            losses.append(mean_loss.item())
    return losses


if __name__ == "__main__":
    bug = chosen_bug("sum", "parameters", "never")
    for variant in ("after backward", "in buckets"):
        print(f"all-reduce {variant}:")
        check_parity(run_ranks(train, 2, variant, bug)[0])
