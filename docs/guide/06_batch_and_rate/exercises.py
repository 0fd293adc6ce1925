"""Exercises of chapter 6. Replace each `raise`, then run `python -m docs.guide.check 6`."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from docs.guide.experiment import batches, network, run_ranks


def learning_rate(step: int, rate: float, batch: int, reference: int, rule: str, warmup: int) -> float:
    """Return the learning rate of a step.

    Args:
        step: 0, 1, 2, ...
        rate: the rate for a global batch of `reference` images.
        batch: the global batch.
        rule: "linear" or "sqrt".
        warmup: the number of steps of the warm-up. The rate rises by equal amounts; step `warmup` is the first with
            all of it, and step 0 has 1 / (warmup + 1) of it.
    """
    raise NotImplementedError("Scale the rate by the rule, then multiply it by a fraction that is at most 1.")


def accumulated_gradient(net: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return the gradient of the mean loss over the images of all micro-batches of all ranks, for each weight.

    Args:
        net: it maps images to logits; its weights have no gradients yet.
        micro_batches: those of this rank, of unequal size. The loss is `F.cross_entropy(net(images), labels)`.
    """
    raise NotImplementedError("Divide by the number of images of all ranks, not by that of micro-batches.")


def check_learning_rate(solution: Callable[[int, float, int, int, str, int], float]) -> None:
    for step, batch, rule, warmup, expected in [
        (0, 24, "linear", 0, 0.1),
        (9, 96, "linear", 0, 0.4),
        (9, 96, "sqrt", 0, 0.2),
        (0, 96, "linear", 3, 0.1),
        (2, 96, "linear", 3, 0.3),
        (7, 96, "linear", 3, 0.4),
    ]:
        got = solution(step, 0.1, batch, 24, rule, warmup)
        assert abs(got - expected) < 1e-9, (
            f"step {step}, batch {batch}, {rule}, warm-up {warmup}: {got}, not {expected}"
        )


def check_accumulated_gradient(solution: Callable[[nn.Module, list[tuple[Tensor, Tensor]]], list[Tensor]]) -> None:
    net, (x, y) = network(), batches(0)[0]
    F.cross_entropy(net(x), y).backward()
    for rank, gradients in enumerate(run_ranks(_gradient_of_parts, 2, solution)):
        for weight, gradient in zip(net.parameters(), gradients, strict=True):
            difference = (gradient - weight.grad).abs().max().item()
            assert difference < 1e-9, f"rank {rank}: a gradient differs by {difference:.1e}"


def _gradient_of_parts(solution: Callable[[nn.Module, list[tuple[Tensor, Tensor]]], list[Tensor]]) -> list[Tensor]:
    """Divide a batch of 24 images into micro-batches of 9 and 5, and 7, 2 and 1 images."""
    x, y = batches(0)[0]
    parts = list(zip(x.split([9, 5, 7, 2, 1]), y.split([9, 5, 7, 2, 1]), strict=True))
    gradients = solution(network(), parts[:2] if dist.get_rank() == 0 else parts[2:])
    return [torch.as_tensor(gradient).clone() for gradient in gradients]
