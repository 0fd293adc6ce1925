"""A run with Muon and a whitening layer stops and resumes under another strategy."""

from pathlib import Path

import pytest

from tests.support.comparison import check_resumed
from tests.support.experiments import EXPERIMENTS, SHORT
from tests.support.interruption import die
from tests.support.pool import Pool
from tests.support.runs import compose, fit

PLACES = {
    "fsdp": ["strategy=fsdp", "trainer.accumulate_grad_batches=2"],
    "pipeline": ["strategy=pipeline"],
    "zero-1": ["strategy=ddp", "strategy.shard_optimizer=true"],
}


@pytest.mark.parametrize("place", PLACES)
def test_resumes_under_another_strategy_and_back(place: str, pool: Pool, small: list[str], folder: Path) -> None:
    """The bias of the whitening layer is frozen during the run."""
    task = ["experiment=parity", *SHORT, *EXPERIMENTS["muon"]]
    reference = fit(compose(folder / "uninterrupted", *small, *task))
    die(compose(folder, *small, *task), "on_train_batch_end", 3)
    there = [*PLACES[place], "trainer.devices=2", f"ckpt_path={folder}/died.ckpt"]
    pool.run(2, die, compose(folder, *small, *task, *there), "on_train_batch_end", 6)
    check_resumed([fit(compose(folder, *small, *task, f"ckpt_path={folder}/died.ckpt"))], reference, done=6)
