"""Chapter 5: a run of four virtual ranks has equal bits on 1, 2 and 4 processes, in float32, with dropout."""

from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import docs.guide.experiment as guide

V = 4  # virtual ranks; each has 6 of the 24 images of a batch, on any number of processes


def flatten(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def tree_sum(tensors: list[Tensor]) -> Tensor:
    """Return (t0 + t1) + (t2 + t3) of four tensors, t0 + t1 of two, and t0 of one."""
    while len(tensors) > 1:
        tensors = [left + right for left, right in zip(tensors[::2], tensors[1::2], strict=True)]
    return tensors[0]


def sum_over_virtual_ranks(own: list[Tensor], bug: str) -> Tensor:
    """Return the sum of the tensors of all virtual ranks, of which this process has some."""
    if bug == "order":
        total = sum(own[1:], start=own[0])  # ((t0 + t1) + t2) + t3 on one process
        dist.all_reduce(total)
        return total
    branches = [torch.empty_like(own[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(branches, tree_sum(own))  # each process has added one branch of the tree
    return tree_sum(branches)


def train(bug: str, ddp: bool = False) -> dict[str, Tensor]:
    """Return the loss of each step, and the weights and buffers after the last one."""
    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), []
    net: Any = guide.network(normalize=True).float()
    net[2].append(nn.Dropout(0.2))
    forward = DistributedDataParallel(net) if ddp else net  # DDP averages gradients by an all-reduce of its own
    weights, buffers, optimizer = list(net.parameters()), list(net.buffers()), guide.sgd(net)
    sizes = [1, *(tensor.numel() for tensor in (*weights, *buffers))]
    for step, (x, y) in enumerate([batch for epoch in range(guide.EPOCHS) for batch in guide.batches(epoch)]):
        passes, at_start = [], [buffer.clone() for buffer in buffers]
        for v in range(rank * V // ranks, (rank + 1) * V // ranks):
            torch.manual_seed(guide.SEED + step * V + (rank if bug == "seed" else v))
            for buffer, value in zip(buffers, at_start, strict=True):
                buffer.copy_(buffer if bug == "buffers" else value)
            optimizer.zero_grad()
            loss = F.cross_entropy(forward(x[v::V].float()), y[v::V])
            loss.backward()
            passes.append(flatten([loss, *(weight.grad for weight in weights), *buffers]))
        mean_loss, *means = (sum_over_virtual_ranks(passes, bug) / V).split(sizes)
        losses.append(mean_loss)
        for weight in weights:
            weight.grad = means.pop(0).view_as(weight)
        for buffer in buffers:
            buffer.copy_(means.pop(0).view_as(buffer))
        optimizer.step()
    return {"losses": flatten(losses), "weights": flatten(weights), "buffers": flatten(buffers)}


if __name__ == "__main__":
    bug = guide.chosen_bug("order", "seed", "buffers")
    runs = {ranks: guide.run_ranks(train, ranks, bug)[0] for ranks in (1, 2, 4)}
    for ranks, run in runs.items():
        hashes = (f"{name} {sha256(tensor.numpy().tobytes()).hexdigest()[:8]}" for name, tensor in run.items())
        print(f"processes: {ranks}, last loss {run['losses'][-1]:.9f}, hash of", ", ".join(hashes))
    for name, tensor in runs[1].items():
        for ranks in (2, 4):
            if not torch.equal(runs[ranks][name], tensor):
                raise SystemExit(f"OTHER BITS: the {name} on {ranks} processes are not those on 1")
    ddp = guide.run_ranks(train, 4, "", True)[0]
    difference = (ddp["losses"] / runs[1]["losses"] - 1).abs().max()
    assert difference < 1e-5, f"DistributedDataParallel has other losses, which differ by {difference:.0e}"
    print(f"same experiment: equal bits; DistributedDataParallel on 4 processes differs by {difference:.0e}")
