"""Chapter 9: data and model parallelism together: two replicas of a pipeline of two stages, on four processes."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from docs.guide.experiment import EPOCHS, batches, check_parity, chosen_bug, network, run_ranks, sgd

REPLICAS, STAGES = 2, 2
MICRO_BATCHES = 2  # of each replica


def make_groups(bug: str) -> tuple[Any, Any]:
    """Return this rank's two groups: the stages of its replica, and the replicas of its stage.

    The ranks stand in a table with a row per replica: [[0, 1], [2, 3]]. Every rank makes all groups, in one order.
    """
    table = torch.arange(REPLICAS * STAGES).view(REPLICAS, STAGES)
    pipelines, data_groups = table.tolist(), table.T.tolist()
    mine = []
    for members in (*pipelines, *data_groups):
        if bug == "members_only" and dist.get_rank() not in members:
            continue
        group = dist.new_group(members, timedelta(seconds=10))
        if dist.get_rank() in members:
            mine.append(group)
    return mine[0], mine[1]


def run_pipeline(net: nn.Module, x: Tensor, y: Tensor, pipeline: Any) -> Tensor:
    """Add up the gradients of a replica's micro-batches by GPipe; return its mean loss, which the last stage has."""
    stage, total = dist.get_rank(pipeline), torch.zeros((), dtype=torch.float64)
    passes = []
    for images, labels in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
        if stage == 0:
            outputs = net(images)
            dist.send(outputs.detach(), group=pipeline, group_dst=1)
            passes.append((images, outputs))
        else:
            inputs = torch.empty(len(images), 256, dtype=torch.float64)
            dist.recv(inputs, group=pipeline, group_src=0)
            loss = F.cross_entropy(net(inputs.requires_grad_()), labels) / MICRO_BATCHES
            total += loss.detach()
            passes.append((inputs, loss))
    for inputs, outputs in passes:
        if stage == 0:
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, group=pipeline, group_src=1)
            outputs.backward(gradient)
        else:
            outputs.backward()
            dist.send(inputs.grad, group=pipeline, group_dst=0)
    return total


def train(bug: str) -> list[float]:
    pipeline, data_group = make_groups(bug)
    stage, replica = dist.get_rank(pipeline), dist.get_rank(data_group)
    net, losses = network()[2 * stage : 2 * stage + 2], []
    optimizer = sgd(net)
    averaged_over = {"pipeline": pipeline, "world": dist.group.WORLD}.get(bug, data_group)
    for epoch in range(EPOCHS):
        for x, y in batches(epoch):
            optimizer.zero_grad()
            loss = run_pipeline(net, x[replica::REPLICAS], y[replica::REPLICAS], pipeline)
            for tensor in [loss, *[weight.grad for weight in net.parameters()]]:
                dist.all_reduce(tensor, group=averaged_over)
                tensor /= dist.get_world_size(averaged_over)
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    bug = chosen_bug("pipeline", "world", "members_only")
    check_parity(run_ranks(train, REPLICAS * STAGES, bug)[1])
