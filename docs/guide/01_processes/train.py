"""Chapter 1: processes that average their gradients by a ring all-reduce, made of send and receive."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import run as torchrun
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from docs.guide.experiment import EPOCHS, batches, check_parity, chosen_bug, network, sgd


def ring_all_reduce(tensor: torch.Tensor) -> int:
    """Replace a vector by its sum over the ranks, and return the number of bytes that this rank has sent."""
    rank, ranks, sent = dist.get_rank(), dist.get_world_size(), 0
    parts = tensor.tensor_split(ranks)
    for step in range(2 * (ranks - 1)):
        outgoing, target = parts[(rank - step) % ranks], parts[(rank - step - 1) % ranks]
        incoming = torch.empty_like(target)
        sending = dist.isend(outgoing, (rank + 1) % ranks)
        dist.recv(incoming, (rank - 1) % ranks)
        sending.wait()
        target.copy_(incoming if step >= ranks - 1 else target + incoming)  # first sums grow, then totals travel
        sent += outgoing.nbytes
    return sent


def compare_with_torch(length: int) -> None:
    ours, theirs = torch.full((2, length), dist.get_rank() + 0.1, dtype=torch.float64)
    start = time.perf_counter()
    sent = ring_all_reduce(ours)
    milliseconds = (time.perf_counter() - start) * 1000
    dist.all_reduce(theirs)
    assert torch.allclose(ours, theirs)
    if dist.get_rank() == 0:
        print(f"ring all-reduce of {ours.nbytes:8} bytes: {sent:8} bytes sent, {milliseconds:6.2f} ms")


def train(bug: str) -> list[float]:
    """Train this rank's part of each batch, and return the loss of each step, averaged over the ranks."""
    rank, ranks, net, losses = dist.get_rank(), dist.get_world_size(), network(), []
    optimizer = sgd(net)
    for x, y in [batch for epoch in range(EPOCHS) for batch in batches(epoch)]:
        logits, labels = net(x[rank::ranks]), y[rank::ranks]
        loss, accuracy = F.cross_entropy(logits, labels), (logits.argmax(1) == labels).double().mean()
        optimizer.zero_grad()
        loss.backward()
        gradient = parameters_to_vector([weight.grad for weight in net.parameters()])
        ring_all_reduce(gradient)
        vector_to_parameters(gradient / ranks, [weight.grad for weight in net.parameters()])
        optimizer.step()
        logged = [loss.detach() / ranks, accuracy / ranks]
        if bug != "rank_0" or rank == 0:
            for number in reversed(logged) if bug == "order" and rank == 1 else logged:
                dist.all_reduce(number)
        losses.append(logged[0].item())
    return losses


def run_rank(bug: str) -> None:
    """Join the other processes: torchrun has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=5 if bug else 30))
    for length in (12, 12, 1_200, 120_000, 1_200_000):
        compare_with_torch(length)
    losses = train(bug)
    if dist.get_rank() == 0:
        check_parity(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    chosen = chosen_bug("order", "rank_0")
    if "RANK" in os.environ:
        run_rank(chosen)
    else:  # start three processes as `torchrun --nproc-per-node=3 -m docs.guide.01_processes.train` does
        torchrun.main(["--standalone", "--nproc-per-node=3", "-m", "docs.guide.01_processes.train", *sys.argv[1:]])
