"""Wall-clock times at which steps end, written by every program that `scripts.dev.bench` compares."""

import json
import time
from pathlib import Path

import torch


class Marks:
    """Writes number and time (`time.time()`, seconds) of the first step and of every `every`-th step."""

    def __init__(self, file: Path, every: int) -> None:
        self.file, self.every = file, every
        self.marks: list[tuple[int, float]] = []

    def step(self, number: int) -> None:
        """Record the end of step `number`; the first is 1."""
        if number == 1 or number % self.every == 0:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.marks.append((number, time.time()))
            self.file.write_text(json.dumps(self.marks))
