"""A run that is stopped at any moment and resumed equals the uninterrupted one, also at another world size."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from src.utils.errors import UserError
from tests.support.comparison import check_resumed
from tests.support.experiments import SHORT, SHORT_EPOCH, SHORT_STEPS
from tests.support.interruption import Died, SaveAndDie, SaveAndDieAtBatch, SaveOnce, die, run_on_ranks
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit

TASK = ["experiment=parity", "scheduler=cosine", *SHORT]
SAVED = 3  # steps, in the middle of an epoch
MLP = ["model=mlp", "~model.width", "model.hidden=[16]"]


def task(folder: Path, small: list[str], devices: int, *overrides: str) -> Any:
    strategy = "ddp" if devices > 1 else "auto"
    return compose(folder, *small, *TASK, f"strategy={strategy}", f"trainer.devices={devices}", *overrides)


@pytest.fixture(scope="module")
def reference(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Record:
    return fit(task(tmp_path_factory.mktemp("uninterrupted"), small, 1))


@pytest.mark.parametrize(
    ("hook", "step", "before", "after"),
    [
        ("on_train_batch_end", 3, 1, 2),
        ("on_train_batch_end", 3, 2, 1),
        ("on_train_batch_start", 3, 1, 1),
        ("on_train_batch_end", SHORT_EPOCH, 1, 1),
        ("on_validation_end", SHORT_EPOCH, 1, 1),
        ("on_train_epoch_end", SHORT_EPOCH, 2, 4),
        ("on_train_batch_end", 7, 4, 2),
    ],
)
def test_resumes_exactly(
    hook: str,
    step: int,
    before: int,
    after: int,
    reference: Record,
    pool: Pool,
    small: list[str],
    folder: Path,
) -> None:
    run_on_ranks(pool, before, die, task(folder, small, before), hook, step)
    resumed = run_on_ranks(pool, after, fit, task(folder, small, after, f"ckpt_path={folder}/died.ckpt"))
    check_resumed(resumed, reference, step)
    for k, batch in enumerate(reference.indices[step:]):
        assert sorted(index for rank in resumed for index in rank.indices[k]) == sorted(batch)


def test_metrics_have_one_row_per_step(reference: Record, small: list[str], folder: Path) -> None:
    cfg = task(folder, small, 1)
    with pytest.raises(Died):  # two steps after the save
        fit(cfg, SaveOnce(SAVED), SaveAndDie("on_train_batch_end", SAVED + 2))
    fit(task(folder, small, 1, f"ckpt_path={folder}/saved.ckpt"))
    rows = (folder / "metrics.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(SHORT_STEPS))


def test_repeats_a_half_accumulated_step(small: list[str], folder: Path) -> None:
    """The number of micro-batches may change."""
    plain = [*TASK, *MLP]
    reference = fit(compose(folder / "uninterrupted", *small, *plain))
    cfg = compose(folder, *small, *plain, "trainer.accumulate_grad_batches=2")
    with pytest.raises(Died):
        fit(cfg, SaveAndDieAtBatch(7))  # the first half of the fourth step
    resumed = fit(compose(folder, *small, *plain, f"ckpt_path={folder}/died.ckpt"))
    check_resumed([resumed], reference, done=SAVED)


def test_dropout_masks_survive_a_restart(small: list[str], folder: Path) -> None:
    dropping = [*TASK, *MLP, "model.dropout=0.5"]
    reference = fit(compose(folder / "uninterrupted", *small, *dropping))
    die(compose(folder, *small, *dropping), "on_train_batch_end", SAVED)
    check_resumed([fit(compose(folder, *small, *dropping, f"ckpt_path={folder}/died.ckpt"))], reference, done=SAVED)


def test_prefetching_workers_do_not_change_resumption(small: list[str], folder: Path) -> None:
    plain = [*TASK, *MLP]
    reference = fit(compose(folder / "uninterrupted", *small, *plain))
    workers = [*plain, "data.num_workers=2"]
    die(compose(folder, *small, *workers), "on_train_batch_end", SAVED)
    check_resumed([fit(compose(folder, *small, *workers, f"ckpt_path={folder}/died.ckpt"))], reference, done=SAVED)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.batch_size=64"], "had data.batch_size=16 (now 64): that is another experiment; set it back, or"),
        (["seed=1"], "had seed=0 (now 1): "),
        (["data.val_fraction=0.2"], "had data.val_fraction=null (now 0.2): "),
        (["trainer.limit_train_batches=3", "data.augment.flip=false"], "data.augment.flip=true (now false), trainer."),
    ],
)
def test_refuses_another_experiment(overrides: list[str], message: str, small: list[str], folder: Path) -> None:
    die(compose(folder, *small, *TASK, *MLP), "on_train_batch_end", SAVED)
    with pytest.raises(UserError, match=re.escape(message)):
        fit(compose(folder, *small, *TASK, *MLP, *overrides, f"ckpt_path={folder}/died.ckpt"))


def test_finished_run_reports_its_result_again(small: list[str], folder: Path) -> None:
    """A run that was interrupted in its test does not train again, but its sweep needs the result."""
    task = [*TASK, *MLP, f"trainer.max_steps={SHORT_EPOCH}"]
    before = fit(compose(folder, *small, *task)).metrics
    again = fit(compose(folder, *small, *task, f"ckpt_path={folder}/checkpoints/last.ckpt"))
    assert again.losses == []
    assert before["val/acc"] == again.metrics["val/acc"]
    assert before.keys() == again.metrics.keys()


def test_metrics_of_the_last_validation_survive_two_kills(small: list[str], folder: Path) -> None:
    task = [*TASK, *MLP, "trainer.max_steps=-1", "trainer.max_epochs=3", "trainer.check_val_every_n_epoch=2"]
    often = "callbacks.checkpoint.every_n_train_steps=1"
    before = fit(compose(folder / "alone", *small, *task, often)).metrics
    for step in (2 * SHORT_EPOCH + 1, 2 * SHORT_EPOCH + 3):
        last = folder / "checkpoints" / "last.ckpt"
        die(
            compose(folder, *small, *task, often, f"ckpt_path={last if last.exists() else 'null'}"),
            "on_train_batch_end",
            step,
        )
    assert fit(compose(folder, *small, *task, often, f"ckpt_path={last}")).metrics.keys() == before.keys()


def test_resumed_run_uses_new_hyper_parameters(small: list[str], folder: Path) -> None:
    die(compose(folder, *small, *TASK), "on_train_batch_end", SAVED)
    changed = ["optimizer.lr=0.02", "optimizer.momentum=0.5", "scheduler=constant"]
    resumed = LearningRates()
    fit(compose(folder, *small, *TASK, *changed, f"ckpt_path={folder}/died.ckpt"), resumed)
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
    fit(compose(folder, *small, *TASK, f"trainer.max_steps={SHORT_EPOCH}"))
    longer, reference_rates = LearningRates(), LearningRates()
    fit(compose(folder, *small, *TASK, f"ckpt_path={folder}/checkpoints/last.ckpt"), longer)
    fit(compose(folder / "uninterrupted", *small, *TASK), reference_rates)
    assert longer.seen == [(pytest.approx(lr), momentum) for lr, momentum in reference_rates.seen[SHORT_EPOCH:]]


def test_worse_epoch_after_a_restart_keeps_the_best_checkpoint(small: list[str], folder: Path) -> None:
    """`last.ckpt` holds the state of `best`, including the epoch at whose end it was written."""
    fit(compose(folder, *small, *TASK, *MLP, f"trainer.max_steps={SHORT_EPOCH}"))
    best = torch.load(folder / "checkpoints" / "best.ckpt")
    state = next(value for name, value in best["callbacks"].items() if "val/acc" in name)
    last = torch.load(folder / "checkpoints" / "last.ckpt")
    kept = next(value for name, value in last["callbacks"].items() if "val/acc" in name)
    assert kept["best_model_path"] == str(folder / "checkpoints" / "best.ckpt")
    assert kept["best_model_score"] is not None
    assert kept["best_model_score"] == state["best_model_score"]


def test_refused_resumption_changes_no_file(small: list[str], folder: Path) -> None:
    die(compose(folder, *small, *TASK, *MLP), "on_train_batch_end", SAVED)
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    with pytest.raises(UserError):
        fit(compose(folder, *small, *TASK, *MLP, "data.batch_size=64", f"ckpt_path={folder}/died.ckpt"))
    with pytest.raises(UserError, match="another `optimizer`"):
        fit(compose(folder, *small, *TASK, *MLP, "optimizer=adamw", f"ckpt_path={folder}/died.ckpt"))
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


def test_finished_run_is_only_tested_again(small: list[str], folder: Path) -> None:
    plain = [*TASK, *MLP]
    fit(compose(folder, *small, *plain, f"trainer.max_steps={SHORT_EPOCH}"), test=True)
    before = (folder / "metrics.csv").read_text()
    again = [*plain, f"trainer.max_steps={SHORT_EPOCH}", f"ckpt_path={folder}/checkpoints/last.ckpt"]
    assert fit(compose(folder, *small, *again), test=True).losses == []
    assert (folder / "metrics.csv").read_text() == before
