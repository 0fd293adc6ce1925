"""engine/onecurve/run/training_loop.py leaves signals to the project's own handler."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import torch.distributed as dist

from tests.support.pool import Pool
from tests.support.runs import compose, fit

STEPS = ["data.batch_size=8", "model=mlp", "trainer.max_steps=40", "trainer.log_every_n_steps=1000"]


def test_ranks_exchange_only_gradients_between_log_points(pool: Pool, small: list[str], folder: Path) -> None:
    """DDP itself reduces gradients. Unpatched, Lightning also broadcasts at each step whether a rank got SIGTERM."""
    cfg = compose(folder, *small, *STEPS, "trainer.devices=2", "trainer.limit_val_batches=0")
    for calls in pool.run(2, _collectives, cfg):
        # Before step 31: whether a rank received a signal, and whether a checkpoint is due.
        assert calls["all_reduce"] == 2, calls
        assert sum(calls.values()) <= 4, calls  # with a barrier before each


def _collectives(cfg: Any) -> Counter[str]:
    """Return how often Python calls each collective between steps 16 and 39."""
    counted: Counter[str] = Counter()
    names = ("all_reduce", "broadcast", "all_gather", "barrier", "all_gather_into_tensor")
    originals = {name: getattr(dist, name) for name in names}

    class Count(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 16:
                for name, original in originals.items():
                    setattr(dist, name, _counting(name, original))
            if batch_idx == 39:
                restore()

    def _counting(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return original(*args, **kwargs)

        return call

    def restore() -> None:
        for name, original in originals.items():
            setattr(dist, name, original)

    stopped_clock = SimpleNamespace(monotonic=lambda: 0.0)  # the interval between polls doubles each time
    try:
        with patch("onecurve.observe.steps.time", stopped_clock):
            fit(cfg, Count())
    finally:
        restore()
    return counted
