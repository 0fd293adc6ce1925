"""With `bit_exact=true` a run that stops anywhere and goes on elsewhere has the bits of one that does not stop."""

from pathlib import Path

import pytest

from tests.support.bits import EXACT, check_equal_bits
from tests.support.experiments import SHORT
from tests.support.interruption import die, run_on_ranks
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit

# Metrics of every kind, values logged in each step and each epoch, and dropout.
METRICS = ["~module", "+module._target_=tests.support.modules.Accumulates", "~model", "~optimizer", "~scheduler"]
TASKS = {"averaged": ["callbacks=[default,ema]", "module.channels_last=false"], "metrics": [*METRICS, "test=false"]}
ONE = ["strategy=auto", "trainer.devices=1"]
TWO, THREE, FOUR = (["strategy=ddp", f"trainer.devices={count}"] for count in (2, 3, 4))
PIPELINE, FSDP = (["trainer.devices=2", f"strategy={name}"] for name in ("pipeline", "fsdp"))
ROWS = [
    ("averaged", "on_train_batch_start", 3, TWO, ONE),
    ("averaged", "on_train_batch_start", 7, ONE, THREE),
    ("averaged", "on_validation_end", 5, PIPELINE, TWO),
    ("averaged", "on_train_epoch_end", 5, FSDP, PIPELINE),
    ("metrics", "on_train_batch_start", 3, TWO, FOUR),
    ("metrics", "on_train_batch_start", 7, THREE, ONE),
]


def _fit(options: list[str], pool: Pool, folder: Path) -> list[Record]:
    cfg = compose(folder, *options)
    return run_on_ranks(pool, cfg.trainer.devices, fit, cfg)


@pytest.mark.parametrize(("task", "hook", "step", "here", "there"), ROWS)
def test_has_the_bits_of_a_run_without_a_stop(
    task: str, hook: str, step: int, here: list[str], there: list[str], pool: Pool, small: list[str], folder: Path
) -> None:
    words = [
        *small,
        *EXACT,
        *SHORT,
        "trainer.max_steps=10",
        *TASKS[task],
        "module.channels_last=false" if task == "averaged" else "",
    ]
    words = [word for word in words if word]
    (reference,) = _fit([*words, *ONE], pool, folder / "alone")
    died = compose(folder / "run", *words, *here)
    run_on_ranks(pool, died.trainer.devices, die, died, hook, step)
    records = _fit([*words, *there, f"ckpt_path={folder}/run/died.ckpt"], pool, folder / "run")
    check_equal_bits(records, reference)
