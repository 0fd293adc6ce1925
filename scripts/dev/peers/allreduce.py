"""The time of an all-reduce and the bandwidth between two of its ranks, for `scripts.dev.bench`.

`torchrun --nproc-per-node=N -m scripts.dev.peers.allreduce --file times.json`. Rank zero sends the same number of bytes
to rank one and back, which gives the bandwidth. A ring that uses all links at once in both directions takes 2(N-1)/N
times the bytes over it (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from scripts.dev.peers.handwritten import join_process_group
from scripts.dev.peers.nets import NETS
from src.utils.process_group import close_process_group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True, help="output file of rank zero")
    parser.add_argument("--net", choices=NETS, default="resnet18", help="network whose gradients are reduced")
    parser.add_argument("--bucket-mb", type=float, help="reduce in pieces of this size, all in flight at once")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    rank, world, device = join_process_group()
    count = sum(weight.numel() for weight in NETS[options.net]().parameters())
    gradients = torch.zeros(count, device=device)
    pieces = gradients.split(int(options.bucket_mb * 2**20 / 4) if options.bucket_mb else count)
    round_trip = _seconds(lambda: _swap(gradients, rank), options.repeats, device)
    reduced = _seconds(lambda: _reduce(pieces), options.repeats, device)
    bandwidth = 2 * gradients.nbytes / round_trip
    bound = 2 * (world - 1) / world * gradients.nbytes / bandwidth
    if rank == 0:
        times = {"all-reduce ms": 1000 * reduced, "bound ms": 1000 * bound, "% of bound": 100 * bound / reduced}
        options.file.write_text(json.dumps({"link GB/s": bandwidth / 1e9} | times))
    close_process_group()


def _seconds(work: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Return this rank's median over `repeats`, each started after a barrier; two more before them warm up."""
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


def _swap(values: Tensor, rank: int) -> None:
    for source, target in ((0, 1), (1, 0)):
        if rank == source:
            dist.send(values, target)
        elif rank == target:
            dist.recv(values, source)


def _reduce(pieces: tuple[Tensor, ...]) -> None:
    for work in [dist.all_reduce(piece, async_op=True) for piece in pieces]:
        work.wait()


if __name__ == "__main__":
    main()
