"""With `bit_exact=true` a run that stops anywhere and goes on elsewhere has the bits of one that does not stop."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.bits import EXACT, check_equal_bits
from tests.support.experiments import SHORT
from tests.support.interruption import die, run_on_ranks
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit

# Metrics of every kind, values logged in each step and each epoch, and dropout.
METRICS = ["~module", "+module._target_=tests.support.modules.Accumulates", "~model", "~optimizer", "~scheduler"]
SHORT_TASK = [*EXACT, *SHORT, "trainer.max_steps=10"]
TASKS = {"averaged": ["callbacks=[default,ema]", "module.channels_last=false"], "metrics": [*METRICS, "test=false"]}
ONE = ["strategy=auto", "trainer.devices=1"]
TWO, THREE, FOUR = (["strategy=ddp", f"trainer.devices={count}"] for count in (2, 3, 4))
PIPELINE, FSDP = (["trainer.devices=2", f"strategy={name}"] for name in ("pipeline", "fsdp"))
ROWS = [
    ("averaged", "on_train_epoch_end", 5, FSDP, PIPELINE),
    ("metrics", "on_train_batch_start", 7, THREE, ONE),
]
SLOW_ROWS = [
    ("averaged", "on_train_batch_start", 3, TWO, ONE),
    ("averaged", "on_train_batch_start", 7, ONE, THREE),
    ("averaged", "on_validation_end", 5, PIPELINE, TWO),
    ("metrics", "on_train_batch_start", 3, TWO, FOUR),
]


@pytest.fixture(scope="module")
def reference(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Record]:
    """Return a function that makes the run without a stop, once for each task."""

    @functools.cache
    def run(task: str) -> Record:
        return fit(compose(tmp_path_factory.mktemp("alone"), *small, *SHORT_TASK, *TASKS[task], *ONE))

    return run


@pytest.mark.parametrize(
    ("task", "hook", "step", "here", "there"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW_ROWS)],
)
def test_has_the_bits_of_a_run_without_a_stop(
    task: str,
    hook: str,
    step: int,
    here: list[str],
    there: list[str],
    reference: Callable[[str], Record],
    pool: Pool,
    small: list[str],
    folder: Path,
) -> None:
    words = [*small, *SHORT_TASK, *TASKS[task]]
    died = compose(folder, *words, *here)
    run_on_ranks(pool, died.trainer.devices, die, died, hook, step)
    resumed = compose(folder, *words, *there, f"ckpt_path={folder}/died.ckpt")
    check_equal_bits(run_on_ranks(pool, resumed.trainer.devices, fit, resumed), reference(task))
