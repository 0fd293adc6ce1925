"""Chapter 12: one slow rank slows all of them; the time that each rank waits shows which one it is."""

import time

import torch
import torch.distributed as dist

from docs.guide.experiment import run_ranks

STEPS = 30
MILLISECONDS = {"equal ranks": [20, 20, 20, 20], "rank 2 is slow": [20, 20, 40, 20]}  # of computation per step


def measure(milliseconds: list[int]) -> tuple[float, float]:
    """Return this rank's milliseconds per step, and how many of them it waits in the all-reduce."""
    dist.barrier()
    start, waiting = time.perf_counter(), 0.0
    for _ in range(STEPS):
        time.sleep(milliseconds[dist.get_rank()] / 1000)  # in place of the computation
        ready = time.perf_counter()
        dist.all_reduce(torch.zeros(1))
        waiting += time.perf_counter() - ready
    return (time.perf_counter() - start) / STEPS * 1000, waiting / STEPS * 1000


if __name__ == "__main__":
    for name, milliseconds in MILLISECONDS.items():
        print(name)
        for rank, (step, waiting) in enumerate(run_ranks(measure, 4, milliseconds)):
            print(f"  rank {rank}: {step:3.0f} ms per step, {waiting:3.0f} ms of them waiting")
