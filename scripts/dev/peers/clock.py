"""`marks.py` as a Lightning callback, in its own file: the hand-written programs import no Lightning."""

from pathlib import Path
from typing import Any

import lightning as L

from scripts.dev.peers.marks import Marks


class Clock(L.Callback):
    """Write the times at which steps end."""

    def __init__(self, file: str, every: int) -> None:
        self._marks = Marks(Path(file), every)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self._marks.step(trainer.global_step)
