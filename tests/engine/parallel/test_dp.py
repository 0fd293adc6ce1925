"""DataParallel without GPUs: it is refused, and everything but torch's own part works."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn

from src.engine.parallel.dp import DP, _forward_on_all
from src.engine.run.experiment import run
from src.engine.utils.errors import UserError
from tests.support.comparison import TOLERANCE, distances
from tests.support.experiments import SHORT_RUN
from tests.support.runs import Record, compose, fit

PARITY = [*SHORT_RUN, "strategy=dp", "trainer.devices=2"]


def test_refuses_to_run_without_gpus(small: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match=r"this run has 0: .* take strategy=ddp"):
        run(compose(folder, *small, *PARITY))


def test_agrees_with_single_process_on_a_cpu(
    alone: Callable[..., Record],
    small: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a CPU torch's DataParallel does not split the batch, so the run is that of one process."""
    monkeypatch.setattr(DP, "setup_environment", ParallelStrategy.setup_environment)
    reference = alone("data.norm_groups=1")
    with caplog.at_level(logging.INFO, "src"):
        record = fit(compose(folder, *small, *PARITY), test=True)
    assert max(distances(record, reference)) < TOLERANCE
    assert record.metrics["test/acc"] == reference.metrics["test/acc"]
    assert "1 x 1 micro-batches x 16 per device" in caplog.text


def test_refuses_recomputation(small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DP, "setup_environment", ParallelStrategy.setup_environment)
    with pytest.raises(UserError, match=r"module.recompute=blocks .* strategy=dp"):
        fit(compose(folder, *small, *PARITY, "module.recompute=blocks"))


class OneThread(nn.Module):
    """DataParallel with one replica: like torch's, it enables autocast in a new thread, with that thread's type."""

    def __init__(self, module: nn.Module, devices: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Tensor:
        enabled = torch.is_autocast_enabled("cpu")

        def work() -> Tensor:
            with torch.autocast("cpu", enabled=enabled):
                return self.module(*inputs)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_replicas_compute_in_the_autocast_type_of_the_run(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn, "DataParallel", OneThread)
    net = nn.Linear(3, 2)
    forward = _forward_on_all(net, devices=None)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        assert forward(torch.ones(4, 3)).dtype == dtype
