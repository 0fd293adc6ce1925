"""A run that is stopped at any moment and resumed equals the uninterrupted one, also at another world size."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from onecurve.errors import UserError
from tests.support.comparison import check_resumed
from tests.support.experiments import SHORT_EPOCH, SHORT_RUN, SHORT_STEPS, SMALL_MLP
from tests.support.interruption import die, run_on_ranks
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit

TASK = ["scheduler=cosine"]
SAVED = 3  # steps, in the middle of an epoch


def task(folder: Path, small: list[str], devices: int, *overrides: str) -> Any:
    strategy = "ddp" if devices > 1 else "auto"
    return compose(folder, *small, *SHORT_RUN, *TASK, f"strategy={strategy}", f"trainer.devices={devices}", *overrides)


@pytest.mark.parametrize(
    ("hook", "step", "before", "after"),
    [
        ("on_train_batch_end", 3, 2, 1),
        ("on_validation_end", SHORT_EPOCH, 1, 1),
        ("on_train_epoch_end", SHORT_EPOCH, 1, 2),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("on_train_batch_start", 3, 1, 1),
                ("on_train_batch_end", SHORT_EPOCH, 1, 1),
                ("on_train_epoch_end", SHORT_EPOCH, 2, 4),
                ("on_train_batch_end", 7, 4, 2),
            )
        ),
    ],
)
def test_resumes_exactly(
    hook: str,
    step: int,
    before: int,
    after: int,
    alone: Callable[..., Record],
    pool: Pool,
    small: list[str],
    folder: Path,
) -> None:
    reference = alone(*TASK)
    run_on_ranks(pool, before, die, task(folder, small, before), hook, step)
    resumed = run_on_ranks(pool, after, fit, task(folder, small, after, f"ckpt_path={folder}/died.ckpt"))
    check_resumed(resumed, reference, step)
    for k, batch in enumerate(reference.indices[step:]):
        assert sorted(index for rank in resumed for index in rank.indices[k]) == sorted(batch)


def test_micro_batches_may_change(alone: Callable[..., Record], small: list[str], folder: Path) -> None:
    """Dropout does not depend on their number."""
    dropping = [*TASK, *SMALL_MLP, "model.dropout=0.5"]
    task = [*small, *SHORT_RUN, *dropping]
    die(compose(folder, *task, "trainer.accumulate_grad_batches=2"), "on_train_batch_end", SAVED)
    resumed = fit(compose(folder, *task, f"ckpt_path={folder}/died.ckpt"))
    check_resumed([resumed], alone(*dropping), done=SAVED)


@pytest.fixture(scope="module")
def died(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that has stopped."""
    folder = tmp_path_factory.mktemp("died")
    die(compose(folder, *small, *SHORT_RUN, *TASK, *SMALL_MLP), "on_train_batch_end", SAVED)
    return folder


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.batch_size=64"], "had data.batch_size=16 (now 64): that is another experiment; set it back, or"),
        (["seed=1"], "had seed=0 (now 1): "),
        (["data.val_fraction=0.2"], "had data.val_fraction=null (now 0.2): "),
        (["trainer.limit_train_batches=3", "data.augment.flip=false"], "data.augment.flip=true (now false), trainer."),
        (["optimizer=adamw"], "another `optimizer`"),
    ],
)
def test_refuses_another_experiment_and_changes_no_file(
    overrides: list[str], message: str, died: Path, small: list[str]
) -> None:
    before = {file.name: file.read_bytes() for file in died.iterdir() if file.is_file()}
    with pytest.raises(UserError, match=re.escape(message)):
        fit(compose(died, *small, *SHORT_RUN, *TASK, *SMALL_MLP, *overrides, f"ckpt_path={died}/died.ckpt"))
    assert {file.name: file.read_bytes() for file in died.iterdir() if file.is_file()} == before


def test_a_batch_size_is_never_hardware(died: Path, small: list[str]) -> None:
    changed = compose(died, *small, *SHORT_RUN, *TASK, *SMALL_MLP, "data.batch_size=24", f"ckpt_path={died}/died.ckpt")
    with pytest.raises(UserError, match=r"the run in ckpt_path had data\.batch_size=16 .* or start a new run$"):
        fit(changed)


def test_finished_run_is_only_tested_again(small: list[str], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that was interrupted in its test does not train again, but its sweep needs the result."""
    task = [*small, *SHORT_RUN, *TASK, *SMALL_MLP, f"trainer.max_steps={SHORT_EPOCH}"]
    before = fit(compose(folder, *task), test=True).metrics
    rows = (folder / "metrics.csv").read_text()
    assert "already" not in caplog.text
    with caplog.at_level(logging.INFO, "onecurve"):
        again = fit(compose(folder, *task, f"ckpt_path={folder}/checkpoints/last.ckpt"), test=True)
    assert f"the run had all its {SHORT_EPOCH} steps already" in caplog.text
    assert again.losses == []
    assert before["val/acc"] == again.metrics["val/acc"]
    assert before.keys() == again.metrics.keys()
    assert (folder / "metrics.csv").read_text() == rows


def test_metrics_of_the_last_validation_survive_two_kills(small: list[str], folder: Path) -> None:
    task = [*small, *SHORT_RUN, *SMALL_MLP, "callbacks.checkpoint.every_n_train_steps=1"]
    task += ["trainer.max_steps=-1", "trainer.max_epochs=3", "trainer.check_val_every_n_epoch=2"]
    before = fit(compose(folder / "alone", *task)).metrics
    last = f"ckpt_path={folder}/checkpoints/last.ckpt"
    die(compose(folder, *task), "on_train_batch_end", 2 * SHORT_EPOCH + 1)
    die(compose(folder, *task, last), "on_train_batch_end", 2 * SHORT_EPOCH + 3)
    assert fit(compose(folder, *task, last)).metrics.keys() == before.keys()


def test_resumed_run_uses_new_hyper_parameters(died: Path, small: list[str], folder: Path) -> None:
    changed = ["optimizer.lr=0.02", "optimizer.momentum=0.5", "scheduler=constant"]
    resumed, last = LearningRates(), f"ckpt_path={died}/died.ckpt"
    fit(compose(folder, *small, *SHORT_RUN, *SMALL_MLP, *changed, last), resumed)
    # scaled by half of the reference batch
    assert resumed.seen == [(pytest.approx(0.01), 0.5)] * (SHORT_STEPS - SAVED)


class LearningRates(L.Callback):
    """Record the learning rate and the momentum of each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        group = trainer.optimizers[0].param_groups[0]
        self.seen.append((group["lr"], group["momentum"]))


def test_extended_run_follows_the_longer_schedule(small: list[str], folder: Path) -> None:
    task = [*small, *SHORT_RUN, *TASK, *SMALL_MLP]
    fit(compose(folder, *task, f"trainer.max_steps={SHORT_EPOCH}"))
    longer, reference_rates = LearningRates(), LearningRates()
    fit(compose(folder, *task, f"ckpt_path={folder}/checkpoints/last.ckpt"), longer)
    fit(compose(folder / "uninterrupted", *task), reference_rates)
    assert longer.seen == [(pytest.approx(lr), momentum) for lr, momentum in reference_rates.seen[SHORT_EPOCH:]]


def test_worse_epoch_after_a_restart_keeps_the_best_checkpoint(small: list[str], folder: Path) -> None:
    """`last.ckpt` holds the state of `best`, including the epoch at whose end it was written."""
    fit(compose(folder, *small, *SHORT_RUN, *TASK, *SMALL_MLP, f"trainer.max_steps={SHORT_EPOCH}"))
    best = torch.load(folder / "checkpoints" / "best.ckpt")
    state = next(value for name, value in best["callbacks"].items() if "val/acc" in name)
    last = torch.load(folder / "checkpoints" / "last.ckpt")
    kept = next(value for name, value in last["callbacks"].items() if "val/acc" in name)
    assert kept["best_model_path"] == str(folder / "checkpoints" / "best.ckpt")
    assert kept["best_model_score"] is not None
    assert kept["best_model_score"] == state["best_model_score"]


def test_a_continued_run_that_ends_within_an_epoch_has_the_position_of_the_uninterrupted_one(
    small: list[str], folder: Path
) -> None:
    """Lightning counts the epochs of a continued run differently."""
    within = [*small, *SHORT_RUN, *TASK, *SMALL_MLP, f"trainer.max_steps={SHORT_EPOCH + 2}"]
    save = [f"+callbacks.kept={{_target_: onecurve.run.saving.LastCheckpoint, dirpath: {folder}/saved}}"]
    positions = []
    for path in (None, f"{folder}/died.ckpt"):
        if path:
            die(compose(folder, *within), "on_train_batch_end", SAVED)
        fit(compose(folder / f"{path is None}", *within, *save, f"ckpt_path={path or 'null'}"))
        positions.append(torch.load(folder / "saved" / "last.ckpt")["position"])
    assert positions[0] == positions[1]
    assert (positions[0]["epoch"], positions[0]["epoch_steps"]) == (1, 2)
