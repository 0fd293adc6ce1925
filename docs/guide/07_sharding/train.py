"""Chapter 7: sharding. First the optimizer's state by hand (ZeRO-1), then all tensors with torch's fully_shard."""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import docs.guide.experiment as guide


class ZeRO1(torch.optim.SGD):
    """Updates this rank's shard of the weights, and gets those of the other ranks."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.ranks = net, dist.get_world_size()
        weights = parameters_to_vector(net.parameters()).detach()
        self.shard = nn.Parameter(weights.chunk(self.ranks)[dist.get_rank()].clone())
        super().__init__([self.shard], guide.RATE, guide.MOMENTUM)

    def reduce_and_clip(self, max_norm: float, bug: str) -> None:
        gradients = parameters_to_vector([weight.grad for weight in self.net.parameters()]) / self.ranks
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(gradients.chunk(self.ranks)))
        squares = self.shard.grad.square().sum()
        if bug != "local_norm":
            dist.all_reduce(squares)  # the squared norm of the gradient of all shards
        self.shard.grad *= (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1)

    def gather(self) -> None:
        shards = [torch.empty_like(self.shard) for _ in range(self.ranks)]
        dist.all_gather(shards, self.shard.detach())
        vector_to_parameters(torch.cat(shards), self.net.parameters())


def train(variant: str, max_norm: float, bug: str) -> list[float]:
    """Return the loss of each step, averaged over the ranks."""
    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), []
    net = guide.network()
    optimizer: Any = ZeRO1(net) if variant == "ZeRO-1" else guide.sgd(net)
    if variant == "fully_shard":
        for layer in [module for module in net.modules() if hasattr(module, "weight")]:
            fully_shard(layer)  # the weights of a layer are gathered when it runs, and freed after it
        fully_shard(net)
        if bug != "optimizer":
            optimizer = guide.sgd(net)  # of the shards, which are new parameters
    for epoch in range(guide.EPOCHS):
        for x, y in guide.batches(epoch):
            loss = F.cross_entropy(net(x[rank::ranks]), y[rank::ranks])
            net.zero_grad()
            loss.backward()
            if variant == "ZeRO-1":
                optimizer.reduce_and_clip(max_norm, bug)
            else:
                clip_grad_norm_(net.parameters(), max_norm)  # it reduces the norm, as the gradients are DTensors
            optimizer.step()
            if variant == "ZeRO-1" and bug != "gather":
                optimizer.gather()
            mean_loss = loss.detach() / ranks
            dist.all_reduce(mean_loss)
            losses.append(mean_loss.item())
    return losses


def train_both(variant: str, bug: str = "") -> list[list[float]]:
    return [train(variant, max_norm, bug) for max_norm in (0.5, math.inf)]


if __name__ == "__main__":
    bug = guide.chosen_bug("local_norm", "gather", "optimizer")
    clipped_alone, _ = guide.run_ranks(train_both, 1, "one process")[0]
    for variant in ("ZeRO-1", "fully_shard"):
        clipped, losses = guide.run_ranks(train_both, 2, variant, bug)[0]
        print(f"{variant}, first with the norm of the gradient clipped to 0.5, then without:")
        guide.check_parity(clipped, clipped_alone)
        guide.check_parity(losses)
