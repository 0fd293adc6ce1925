"""Chapter 0: the experiment on one process, what a step computes and stores, and how long it takes."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from docs.guide.experiment import BATCH, EPOCHS, batches, check_parity, chosen_bug, network, sgd


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Take one optimizer step, and return the loss before it."""
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def count_flops() -> int:
    """Return the floating-point operations of a step's layers, counted by hand and by torch."""
    # Each number of the output is a sum of products: 2 operations per weight that it meets.
    outputs, weights_met = [8 * 8 * 8, 16 * 4 * 4, 32, 10], [3 * 9, 8 * 9, 256, 32]
    forward = [2 * output * weights for output, weights in zip(outputs, weights_met, strict=True)]
    backward = 2 * sum(forward) - forward[0]  # gradients of weights and of inputs, but not of the images
    by_hand = BATCH * (sum(forward) + backward)
    net, (x, y) = network(), batches(0)[0]
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(x), y).backward()
    assert counter.get_total_flops() == by_hand, f"torch counts {counter.get_total_flops()}"
    return by_hand


def count_bytes() -> dict[str, int]:
    """Return the bytes in memory during a step."""
    net, (x, y) = network(), batches(0)[0]
    weights = {weight.data_ptr(): weight.nbytes for weight in net.parameters()}
    saved: dict[int, int] = {}  # what backward needs, by its place in memory

    def record(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        F.cross_entropy(net(x), y)
    activations = sum(nbytes for place, nbytes in saved.items() if place not in weights)
    total = sum(weights.values())
    return {"weights": total, "gradients": total, "momentum": total, "activations": activations}


def train(bug: str) -> list[float]:
    """Train on a queue of steps, and print how many operations it does in a second."""
    net = network()
    optimizer = sgd(net)
    steps = [batch for epoch in range(EPOCHS) for batch in batches(epoch)]
    device = ThreadPoolExecutor(max_workers=1)  # as a GPU, it works while this thread goes on
    start = time.perf_counter()
    queued = [device.submit(step, net, optimizer, x, y) for x, y in steps]
    if bug != "no_wait":
        queued[-1].result()  # torch.cuda.synchronize() for a GPU
    seconds = time.perf_counter() - start
    is_done = queued[-1].done()
    speed = len(steps) * count_flops() / seconds / 1e9
    print(f"{len(steps)} steps in {seconds * 1000:.2f} ms: {speed:.2f} GFLOP/s")
    if not is_done:
        raise SystemExit("WRONG TIME: steps were still running when the clock was stopped")
    return [each.result() for each in queued]


if __name__ == "__main__":
    bug = chosen_bug("no_wait")
    print(f"operations of a step: {count_flops():,}")
    print("bytes of a step:", ", ".join(f"{name} {number:,}" for name, number in count_bytes().items()))
    check_parity(train(bug))
