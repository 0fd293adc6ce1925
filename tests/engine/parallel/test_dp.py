"""DataParallel without GPUs: it is refused, and everything but torch's own part works."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch.strategies import ParallelStrategy

from onecurve.errors import UserError
from onecurve.parallel.dp import DP
from tests.engine.random.test_dropout import TWO_VIEWS
from tests.support.comparison import TOLERANCE, distances
from tests.support.experiments import SHORT_RUN
from tests.support.runs import Record, compose, fit

PARITY = [*SHORT_RUN, "strategy=dp", "trainer.devices=2"]


def test_agrees_with_single_process_on_a_cpu(
    alone: Callable[..., Record],
    small: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a CPU torch's DataParallel does not split the batch, so the run is that of one process."""
    monkeypatch.setattr(DP, "setup_environment", ParallelStrategy.setup_environment)
    reference = alone("virtual_ranks=1")
    with caplog.at_level(logging.INFO, "onecurve"):
        record = fit(compose(folder, *small, *PARITY), test=True)
    assert max(distances(record, reference)) < TOLERANCE
    assert record.metrics["test/acc"] == reference.metrics["test/acc"]
    assert "1 x 1 micro-batches x 16 per device" in caplog.text


@pytest.mark.parametrize("option", ["module.recompute=blocks", "trainer.precision=bf16-mixed"])
def test_refuses_what_copies_of_the_network_lose(
    option: str, small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DP, "setup_environment", ParallelStrategy.setup_environment)
    with pytest.raises(UserError, match=f"strategy=dp .*{option.partition('=')[0]}"):
        fit(compose(folder, *small, *PARITY, option))


def test_refuses_a_second_pass_with_dropout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy of the network would have the masks of the first pass."""
    monkeypatch.setattr(DP, "setup_environment", ParallelStrategy.setup_environment)
    with pytest.raises(UserError, match="strategy=dp: a step calls `net` again"):
        fit(compose(folder, *TWO_VIEWS, "+module.recomputes=false", "strategy=dp", "trainer.devices=2"))
