"""Throughput readings match an independent measurement under every strategy, and have no side effects."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from onecurve.observe.throughput import Throughput, flops_per_sample, peak_flops
from onecurve.observe.timeline import Timeline
from onecurve.parallel.dp import DP
from onecurve.run.experiment import assemble
from tests.engine.observe.test_timeline import DELAY, MLP, Clock, Slow
from tests.engine.observe.test_timeline import clock as clock
from tests.support.comparison import read_rows
from tests.support.pool import Pool
from tests.support.runs import compose, fit

NAMES = {f"throughput/{name}" for name in ("samples_per_sec", "step_ms", "data_fraction", "peak_memory_mib")}


def rows(folder: Path) -> list[dict[str, float]]:
    """Return the rows of a run's log points."""
    read = [{name: float(value) for name, value in row.items() if value} for row in read_rows(folder)]
    return [row for row in read if "throughput/samples_per_sec" in row]


def test_measures_all_but_validation_and_checkpoints(clock: Clock, small: list[str], folder: Path) -> None:
    """Data and optimizer take a delay of each batch; validations and checkpoints take some as well."""
    cfg = compose(folder, *small, *MLP, "trainer.max_epochs=2", "callbacks.checkpoint.every_n_train_steps=3")
    places = ("data", "optimizer", "validation", "save")
    fit(cfg, *(Slow(place, sleep=clock.sleep) for place in places))
    logged = rows(folder)
    assert len(logged) == 6, "every fourth of 22 steps, and the last one"
    assert [row for row in logged if "throughput/data_fraction" in row]
    for row in logged:
        assert row["throughput/step_ms"] == pytest.approx(2000 * DELAY)
        assert row["throughput/samples_per_sec"] == pytest.approx(32 / (2 * DELAY))
        assert 0 < row.get("throughput/data_fraction", 0.5) < 1, "a save may interrupt the recorded step"
        assert 50 < row["throughput/peak_memory_mib"] < 50_000
        assert "throughput/mfu" not in row


def test_micro_batches_and_medians_at_the_end(
    clock: Clock, small: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    halves = ["trainer.max_epochs=1", "trainer.accumulate_grad_batches=2", "callbacks.throughput.peak_tflops=0.001"]
    slow = [Slow(place, sleep=clock.sleep) for place in ("data", "optimizer")]
    with caplog.at_level(logging.INFO, "onecurve"):
        fit(compose(folder, *small, *MLP, *halves), *slow)
    assert [row["throughput/step_ms"] for row in rows(folder)] == [pytest.approx(2000 * DELAY)] * 3
    (message,) = [record.getMessage() for record in caplog.records if record.name == "onecurve.observe.throughput"]
    for name in ("samples_per_sec", "step_ms", "data_fraction", "peak_memory_mib", "mfu", "gflop_per_step"):
        assert name in message


def test_utilization_counts_the_devices_of_all_nodes() -> None:
    logged: dict[str, float] = {}
    module: Any = SimpleNamespace(device=torch.device("cpu"), log_dict=logged.update)
    strategy = SimpleNamespace(root_device=module.device, all_gather=lambda values: values[None])
    trainer: Any = SimpleNamespace(callbacks=[], num_devices=2, num_nodes=4, world_size=1, strategy=strategy)
    trainer.datamodule = SimpleNamespace(global_batch_size=10)
    trainer.callbacks = [timeline := Timeline("")]
    timeline.step_seconds = 0.5
    throughput = Throughput()
    throughput._peak_flops, throughput._step_flops = 100.0, 80.0
    throughput._report(trainer, module)
    assert float(logged["throughput/mfu"]) == pytest.approx(80 / 0.5 / (2 * 4) / 100)
    assert float(logged["throughput/samples_per_sec"]) == 20


@pytest.mark.parametrize("strategy", ["hybrid", "dp"])
def test_counts_the_full_network_under_every_strategy(
    strategy: str, pool: Pool, small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mfu` times peak times time equals the counted operations of the full network; only rank zero logs."""
    options = ["model=resnet9", "model.width=4", "data.batch_size=32", "trainer.limit_train_batches=3"]
    few = [*options, "trainer.log_every_n_steps=3", "trainer.max_epochs=1", "callbacks.throughput.peak_tflops=1"]
    cfg = compose(folder, *small, *few, f"strategy={strategy}", "trainer.devices=2")
    if strategy == "dp":
        monkeypatch.setattr(DP, "setup_environment", ParallelStrategy.setup_environment)
        fit(cfg)
    else:
        pool.run(2, fit, cfg)
    (row,) = rows(folder)
    assert set(row) >= NAMES | {"throughput/mfu"}
    done = row["throughput/mfu"] * 2 * 1e12 * row["throughput/step_ms"] / 1000
    _, module, data = assemble(compose(folder, *small, *few))
    images, target = torch.randn(32, *data.image_shape), torch.zeros(32, 10)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.cross_entropy(module(images), target).backward()
    assert done == pytest.approx(counter.get_total_flops(), rel=1e-4)


@pytest.mark.parametrize("model", ["resnet9", "vit"])
def test_counting_changes_no_state(model: str, small: list[str], folder: Path) -> None:
    _, module, data = assemble(compose(folder, *small, f"model={model}"))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    random = torch.get_rng_state()
    assert (flops_per_sample(module.net, data.image_shape) or 0.0) > 1e6
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(weight.grad is None for weight in module.parameters())


class Recomputing(nn.Sequential):
    """A network that recomputes all of it, by itself."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, images, use_reentrant=False)


def test_counting_changes_no_state_of_a_network_that_recomputes(small: list[str], folder: Path) -> None:
    _, module, data = assemble(compose(folder, *small, "model=mlp"))
    module.net = Recomputing(nn.Flatten(), nn.Linear(3072, 10), nn.BatchNorm1d(10))
    counted = flops_per_sample(module.net, data.image_shape)
    assert counted == 3 * 2 * 3072 * 10, "forward twice, and the weights' gradient"
    assert module.net[2].num_batches_tracked == 0


@pytest.mark.parametrize(("model", "tera"), [("resnet9", 156), ("mlp", 19.5)])
def test_peak_is_that_of_the_type_that_computes(
    model: str, tera: float, small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An A100 convolves float32 in TF32."""
    trainer, module, _ = assemble(compose(folder, *small, f"model={model}"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr("lightning.fabric.accelerators.cuda._is_ampere_or_later", lambda: True)
    monkeypatch.setattr(type(module), "device", torch.device("cuda"))
    assert peak_flops(trainer, module) == pytest.approx(tera * 1e12)
