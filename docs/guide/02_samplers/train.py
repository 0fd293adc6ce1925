"""Chapter 2: torch's DistributedSampler divides the batches; the evaluation does not count its padding."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from docs.guide.experiment import BATCH, EPOCHS, check_parity, chosen_bug, images, network, run_ranks, sgd

RANKS, TEST_IMAGES = 3, 50  # the images do not divide by the ranks


def average(tensors: list[Tensor]) -> None:
    """Replace each tensor by its mean over the ranks; the next chapter is about this."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= RANKS


def train(net: nn.Module, bug: str) -> list[float]:
    """Train this rank's part of each batch, and return the loss of each step, averaged over the ranks."""
    rank, losses = dist.get_rank(), []
    optimizer, data = sgd(net), images()
    sampler = DistributedSampler(data, RANKS, rank, shuffle=True)  # its seed is 0, as that of the experiment
    is_missing = bug == "rank_0_sampler" and rank > 0
    loader = DataLoader(data, BATCH // RANKS, sampler=None if is_missing else sampler)
    for epoch in range(EPOCHS):
        if bug != "no_set_epoch":
            sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            average([weight.grad for weight in net.parameters()])
            optimizer.step()
            mean_loss = loss.detach()
            average([mean_loss])
            losses.append(mean_loss.item())
    return losses


@torch.no_grad()
def evaluate(net: nn.Module, bug: str) -> tuple[float, float]:
    """Return the mean loss of the test images and their number; each rank evaluates a part of them."""
    data, sums = images(TEST_IMAGES, seed=2), torch.zeros(2, dtype=torch.float64)
    sampler = DistributedSampler(data, RANKS, dist.get_rank(), shuffle=False)  # it repeats images: all parts are equal
    positions = dist.get_rank() + RANKS * torch.arange(len(sampler))
    is_image = positions < (len(data) if bug != "duplicates" else math.inf)  # the rest is padding
    for (x, y), counts in zip(DataLoader(data, 10, sampler=sampler), is_image.split(10), strict=True):
        losses = F.cross_entropy(net(x), y, reduction="none")
        sums += torch.stack([losses[counts].sum(), counts.sum()])  # means of batches of unequal size would be wrong
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item(), sums[1].item()


def run_rank(bug: str) -> tuple[list[float], float, float, float]:
    net = network()
    losses = train(net, bug)
    x, y = images(TEST_IMAGES, seed=2).tensors
    return losses, *evaluate(net, bug), F.cross_entropy(net(x), y).item()


if __name__ == "__main__":
    bug = chosen_bug("no_set_epoch", "duplicates", "rank_0_sampler")
    losses, test_loss, counted, expected = run_ranks(run_rank, RANKS, bug, seconds=5 if bug else 30)[0]
    print(f"test loss {test_loss:.9f} over {counted:.0f} images; one process: {expected:.9f} over {TEST_IMAGES}")
    if abs(test_loss / expected - 1) > 1e-9:
        raise SystemExit(f"ANOTHER EVALUATION: {counted:.0f} images were counted instead of {TEST_IMAGES}")
    check_parity(losses)
