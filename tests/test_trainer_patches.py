"""src/run/trainer_patches.py removes work from Lightning's loop, and keeps its behavior."""

from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import nn

from src.utils.log_points import is_log_point
from tests.support.pool import Pool
from tests.support.runs import compose, fit

STEPS = ["data.batch_size=8", "model=mlp", "trainer.max_steps=40", "trainer.log_every_n_steps=1000"]


class Ends(L.Callback):
    """Count the ends of steps, and implement no other hook."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1


def test_calls_only_overridden_hooks(small: list[str], folder: Path) -> None:
    from src.run.experiment import assemble
    from src.run.trainer_patches import patch_trainer

    trainer, module, data = assemble(compose(folder, *small, *STEPS))
    trainer.callbacks.append(ends := Ends())
    patch_trainer(trainer, module)
    assert ends.on_after_backward is None
    assert module.on_after_backward is None
    trainer.fit(module, datamodule=data)
    assert ends.count == 40


@pytest.mark.parametrize("profiler", ["simple", None])
def test_profiler_is_used_if_configured(profiler: str | None, small: list[str], folder: Path) -> None:
    from src.run.experiment import assemble
    from src.run.trainer_patches import NullProfiler

    trainer, _, _ = assemble(compose(folder, *small, *STEPS, f"+trainer.profiler={profiler or 'null'}"))
    assert isinstance(trainer.profiler, NullProfiler) == (profiler is None)


def test_ranks_exchange_only_gradients_between_log_points(pool: Pool, small: list[str], folder: Path) -> None:
    """DDP itself reduces gradients. Unpatched, Lightning also broadcasts at each step whether a rank got SIGTERM."""
    cfg = compose(folder, *small, *STEPS, "trainer.devices=2", "trainer.limit_val_batches=0")
    for calls in pool.run(2, _collectives, cfg):
        assert calls["all_reduce"] == 1, calls  # whether a rank received a signal, before step 31
        assert sum(calls.values()) <= 2, calls  # with the barrier before it


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
        with patch("src.utils.consensus.time", stopped_clock):
            fit(cfg, Count())
    finally:
        restore()
    return counted


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, False),
        ({"every_n_epochs": 2}, False),
        ({"every_n_train_steps": 3}, True),
        ({"train_time_interval": timedelta(minutes=1)}, True),
        ({"train_time_interval": timedelta(0)}, True),
    ],
)
def test_checkpoint_callback_runs_only_at_steps_that_may_save(
    options: dict[str, Any], asked: bool, small: list[str], folder: Path
) -> None:
    from src.run.experiment import assemble
    from src.run.trainer_patches import patch_trainer

    trainer, module, _ = assemble(compose(folder, *small, *STEPS))
    trainer.callbacks.append(saves := ModelCheckpoint(folder, **options))
    patch_trainer(trainer, module)
    assert callable(saves.on_train_batch_end) == asked


def test_module_keeps_its_submodules_and_current_hook(small: list[str], folder: Path) -> None:
    from src.run.experiment import assemble

    _, module, _ = assemble(compose(folder, *small, *STEPS))
    module._current_fx_name = "training_step"
    module.more = nn.Linear(1, 1)
    assert module._current_fx_name == "training_step"
    assert "more.weight" in module.state_dict()


def test_logged_values_move_only_between_devices(small: list[str], folder: Path) -> None:
    from src.run.experiment import assemble

    trainer, _, _ = assemble(compose(folder, *small, *STEPS))
    results: Any = trainer.fit_loop.epoch_loop._results
    with patch.object(_ResultMetric, "to", autospec=True, side_effect=_ResultMetric.to) as moves:
        for device in ("cpu", "cpu", "meta", "meta"):
            results.log("training_step", "loss", torch.ones((), device=device), on_step=True, on_epoch=True)
            assert results["training_step.loss"].value.device.type == device
    assert [call.args[1].type for call in moves.call_args_list] == ["meta"]


@pytest.mark.parametrize("every", [1, 7])
def test_logged_values_are_gathered_once_and_current(every: int, small: list[str], folder: Path) -> None:
    from src.run.experiment import assemble

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
            if is_log_point(trainer, trainer.global_step):
                seen[trainer.global_step] = float(trainer.callback_metrics["train/loss"]), float(outputs["loss"])
            else:
                assert float(trainer.callback_metrics["train/loss"]) == list(seen.values())[-1][0]

    seen: dict[int, tuple[float, float]] = {}
    trainer, module, data = assemble(compose(folder, *small, *STEPS, f"trainer.log_every_n_steps={every}"))
    trainer.callbacks.append(Look())
    with patch.object(_ResultCollection, "metrics", autospec=True, side_effect=_ResultCollection.metrics) as gathered:
        trainer.fit(module, datamodule=data)
    assert all(logged == pytest.approx(loss) for logged, loss in seen.values())
    assert list(seen) == sorted({1, *range(every, 41, every), 40})
    of_steps = [call for call in gathered.call_args_list if call.args[0].training and call.args[1]]
    assert len(of_steps) <= 3 * len(seen) + 2
