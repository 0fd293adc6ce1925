"""When steps end, in wall-clock time: written by every program that `scripts.bench` compares."""

import json
import time
from pathlib import Path

import torch


class Marks:
    """Number and time (`time.time()`) of the first step and of every `every`-th, written at each of them."""

    def __init__(self, file: Path, every: int) -> None:
        self.file, self.every = file, every
        self.marks: list[tuple[int, float]] = []

    def step(self, number: int) -> None:
        """Step `number` (the first is 1) has ended."""
        if number == 1 or number % self.every == 0:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.marks.append((number, time.time()))
            self.file.write_text(json.dumps(self.marks))
