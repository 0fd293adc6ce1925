"""DataParallel without GPUs: it is refused, and everything but torch's own part works."""

import logging
from pathlib import Path

import pytest
from lightning.pytorch.strategies import ParallelStrategy

from src.run.experiment import run
from src.strategies.dp import DP
from src.utils.errors import UserError
from tests.support.comparison import TOLERANCE, distances
from tests.support.experiments import SHORT
from tests.support.runs import compose, fit

PARITY = ["experiment=parity", *SHORT, "strategy=dp", "trainer.devices=2"]


def test_refuses_to_run_without_gpus(small: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match=r"this run has 0: .* take strategy=ddp"):
        run(compose(folder, *small, *PARITY))


def test_agrees_with_single_process_on_a_cpu(
    small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU torch's DataParallel does not split the batch, so the run is that of one process."""
    monkeypatch.setattr(DP, "setup_environment", ParallelStrategy.setup_environment)
    reference = fit(compose(folder / "single", *small, "experiment=parity", *SHORT), test=True)
    with caplog.at_level(logging.INFO, "src"):
        record = fit(compose(folder, *small, *PARITY), test=True)
    assert max(distances(record, reference)) < TOLERANCE
    assert record.metrics["test/acc"] == reference.metrics["test/acc"]
    assert "1 x 2 micro-batches x 8 per device" in caplog.text


def test_refuses_a_batch_that_does_not_divide(small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DP, "setup_environment", ParallelStrategy.setup_environment)
    with pytest.raises(UserError, match=r"set data.batch_size="):
        fit(compose(folder, *small, *PARITY, "data.batch_size=33"))
