"""The layers that each rank calls: under FSDP, ranks that call different ones wait for each other until a timeout."""

import os
from collections import defaultdict
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onecurve.process.log import REPORT_FILE

_FILE = "layer_calls"  # beside the report of each rank
_KEPT = 4096  # newest calls; the ranks stop a few calls after those that differ
_SIZE = 8 * (_KEPT + 1)  # bytes


def record_layer_calls(layers: dict[str, nn.Module]) -> None:
    """Record the starts and ends of these layers, if a launcher started this rank that compares them.

    They are in a mapped file, which remains however the process ends. It has the number of each event at the number of
    earlier events modulo `_KEPT`, then the number of all events, then what the events are. An event takes some
    microseconds.
    """
    if REPORT_FILE not in os.environ:
        return
    names = [f"{verb} {name}" for name in layers for verb in ("called", "left")]
    file = Path(os.environ[REPORT_FILE]).with_name(_FILE)
    file.write_bytes(bytes(_SIZE) + "\n".join(names).encode())
    with file.open("r+b") as stream:
        events = memoryview(mmap(stream.fileno(), _SIZE)).cast("Q")

    @torch.compiler.disable
    def record(number: int, *_: Any) -> None:
        events[events[_KEPT] % _KEPT] = number
        events[_KEPT] += 1

    for number, layer in enumerate(layers.values()):
        layer.register_forward_pre_hook(partial(record, 2 * number), prepend=True)  # before FSDP's, which may hang
        layer.register_forward_hook(partial(record, 2 * number + 1))


def first_different_calls(reports: Path) -> str:
    """Return what the ranks did when they first differed, "" if all did the same; `reports` has a folder for each rank.

    A rank that is behind the others, or has ended, has not differed.
    """
    ranks = {int(file.parent.name): file.read_bytes() for file in reports.rglob(_FILE)}
    events = {rank: memoryview(content[:_SIZE]).cast("Q") for rank, content in sorted(ranks.items())}
    counts = [numbers[_KEPT] for numbers in events.values()]
    for position in range(max(0, max(counts, default=0) - _KEPT), min(counts, default=0)):
        done = defaultdict(list)
        for rank, numbers in events.items():
            done[ranks[rank][_SIZE:].decode().split("\n")[numbers[position % _KEPT]]].append(str(rank))
        if len(done) > 1:
            return ", but ".join(f"rank {' and '.join(numbers)} {event}" for event, numbers in done.items())
    return ""
