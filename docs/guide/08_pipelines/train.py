"""Chapter 8: the network cut into two stages, one per process: naive, GPipe and 1F1B."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from docs.guide.experiment import EPOCHS, batches, check_parity, chosen_bug, network, run_ranks, sgd

STAGES = 2
SCHEDULES = {"naive": 1, "gpipe": 4, "1f1b": 4}  # the numbers of micro-batches


def passes(schedule: str, stage: int, micro_batches: int) -> list[tuple[str, int]]:
    """Return the order in which a stage runs the forward and backward passes of its micro-batches."""
    forward = [("forward", index) for index in range(micro_batches)]
    backward = [("backward", index) for index in range(micro_batches)]
    warm_up = micro_batches if schedule == "gpipe" else min(micro_batches, STAGES - 1 - stage)
    pairs = [one for pair in zip(forward[warm_up:], backward, strict=False) for one in pair]
    return forward[:warm_up] + pairs + backward[micro_batches - warm_up :]


def run_step(net: nn.Module, x: Tensor, y: Tensor, order: list[tuple[str, int]], bug: str) -> tuple[float, int]:
    """Run the passes of a batch; return the loss, which the last stage has, and the most micro-batches in flight."""
    stage, micro_batches = dist.get_rank(), len(order) // 2
    xs, ys = x.chunk(micro_batches), y.chunk(micro_batches)
    in_flight: dict[int, tuple[Tensor, Tensor]] = {}
    sent: list[dist.Work | None] = []
    loss, most = 0.0, 0
    for kind, index in order:
        message = torch.empty(len(xs[index]), 256, dtype=torch.float64)  # 256 numbers per image pass between stages
        is_receiver = (kind == "forward") == (stage == 1)
        if is_receiver:
            dist.recv(message, 1 - stage)
        if kind == "forward":
            inputs = message.requires_grad_() if stage == 1 else xs[index]
            outputs = message = net(inputs)
            if stage == 1:
                outputs = F.cross_entropy(outputs, ys[index])
                loss += outputs.item() / micro_batches
                outputs = outputs if bug == "sum" else outputs / micro_batches
            in_flight[index] = inputs, outputs
            most = max(most, len(in_flight))
        else:
            if bug == "zeroed":
                net.zero_grad()
            inputs, outputs = in_flight.pop(index)
            outputs.backward(message if stage == 0 else None)
            message = inputs.grad
        if not is_receiver:
            send = dist.send if bug == "blocking" else dist.isend
            sent.append(send(message.detach(), 1 - stage))
    for work in filter(None, sent):
        work.wait()
    return loss, most


def train(bug: str) -> list[tuple[list[float], int]]:
    """Train under each schedule; return the losses, which the last stage has, and the micro-batches in flight."""
    stage, results = dist.get_rank(), []
    for schedule, micro_batches in SCHEDULES.items():
        net, losses, most = network()[2 * stage : 2 * stage + 2], [], 0
        optimizer = sgd(net)
        for epoch in range(EPOCHS):
            for x, y in batches(epoch):
                optimizer.zero_grad()
                loss, most = run_step(net, x, y, passes(schedule, stage, micro_batches), bug)
                optimizer.step()
                losses.append(loss)
        assert most == (micro_batches if schedule == "gpipe" else min(micro_batches, STAGES - stage))
        results.append((losses, most))
    return results


if __name__ == "__main__":
    bug = chosen_bug("sum", "zeroed", "blocking")
    first, last = run_ranks(train, STAGES, bug, seconds=8 if bug == "blocking" else 30)
    for schedule, (_, most), (losses, most_of_last) in zip(SCHEDULES, first, last, strict=True):
        print(f"{schedule}: {most} and {most_of_last} micro-batches in flight")
        check_parity(losses)
