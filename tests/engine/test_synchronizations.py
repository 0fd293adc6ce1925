"""There is no host-device synchronization between log points: on a GPU torch itself raises at each.

`engine/dev/dry_gpu` finds them on a machine without a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from onecurve.run.experiment import assemble
from tests.support.runs import compose

# The defaults of a run: progress bar, metrics.csv and checkpoints; also a checkpoint by time within an epoch.
OPTIONS = ["trainer.accelerator=gpu", "trainer.devices=1", "logger=none", "trainer.max_epochs=2", "model.width=4"]
OPTIONS += ["data.batch_size=32", "trainer.log_every_n_steps=4"]


class BetweenLogPoints(L.Callback):
    """Raise at synchronizations in the loop's steps, except log points, the steps up to the first, and epoch ends."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop

        def watched(part: Callable[[Any], None], ahead: int, fetcher: Any) -> None:
            step = loop.global_step + ahead
            between = step > trainer.log_every_n_steps and step % trainer.log_every_n_steps
            last = loop.batch_progress.current.ready + 1 >= trainer.num_training_batches
            if between and not last:
                self.steps += 1
                with _no_synchronization():
                    part(fetcher)
            else:
                part(fetcher)

        for name, part in (("advance", loop.advance), ("on_advance_end", loop.on_advance_end)):
            setattr(loop, name, partial(watched, part, 1 if name == "advance" else 0))


@contextmanager
def _no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("resident", ["true", "false"])
def test_no_synchronization_on_a_gpu(resident: str, small: list[str], folder: Path) -> None:
    trainer, module, data = assemble(compose(folder, *small, *OPTIONS, f"data.device_resident={resident}", quiet=False))
    between = BetweenLogPoints()
    trainer.callbacks.insert(0, between)
    trainer.fit(module, datamodule=data)
    assert between.steps >= 16
