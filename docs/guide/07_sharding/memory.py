"""Chapter 7: the bytes that a rank holds between two steps, with AdamW, which has two moments."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from docs.guide.experiment import batches, network, run_ranks


def count(tensors: Any) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def measure(variant: str) -> list[int]:
    """Take a step, and return the bytes of weights, gradients and moments on this rank."""
    net: Any = network()
    if variant == "fully_shard":
        fully_shard(net)
    else:
        net = DistributedDataParallel(net)
    weights = list(net.parameters())
    if variant == "ZeRO-1":
        optimizer: Any = ZeroRedundancyOptimizer(weights, torch.optim.AdamW)
    else:
        optimizer = torch.optim.AdamW(weights)
    x, y = batches(0)[0]
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    state = optimizer.optim.state if variant == "ZeRO-1" else optimizer.state
    moments: list[Tensor] = [state[weight][name] for weight in state for name in ("exp_avg", "exp_avg_sq")]
    return [count(weights), count(weight.grad for weight in weights), count(moments)]


if __name__ == "__main__":
    print("             weights  gradients    moments")
    for variant in ("DDP", "ZeRO-1", "fully_shard"):
        for rank, held in enumerate(run_ranks(measure, 2, variant)):
            print(f"{variant:11} {held[0]:8,} {held[1]:10,} {held[2]:10,}  on rank {rank}")
