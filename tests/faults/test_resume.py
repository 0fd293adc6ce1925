"""A run that was stopped at any moment and resumed, also at another world size, is the run that was not."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from src.errors import UserError
from tests.pool import Pool
from tests.runs import Record, compose, fit, relative

STEPS_PER_EPOCH = 11
TASK = ["experiment=parity", "scheduler=cosine"]
MLP = ["model=mlp", "~model.width", "model.hidden=[16]"]


class Died(Exception):
    """What ends a run in the middle."""


class SaveAndDie(L.Callback):
    """Saves a checkpoint in one of Lightning's hooks, then raises."""

    def __init__(self, hook: str, step: int) -> None:
        self.hook, self.step = hook, step

    def _fire(self, hook: str, trainer: L.Trainer) -> None:
        if hook == self.hook and trainer.global_step >= self.step:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "died.ckpt")
            raise Died

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._fire("on_train_batch_end", trainer)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._fire("on_train_batch_start", trainer)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._fire("on_validation_end", trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._fire("on_train_epoch_end", trainer)


def die(cfg: Any, hook: str, step: int) -> None:
    with pytest.raises(Died):
        fit(cfg, SaveAndDie(hook, step))


def in_world(pool: Pool, devices: int, job: Any, *args: Any) -> list[Any]:
    return pool.run(devices, job, *args) if devices > 1 else [job(*args)]


def task(folder: Path, small: list[str], devices: int, *overrides: str) -> Any:
    strategy = "ddp" if devices > 1 else "auto"
    return compose(folder, *small, *TASK, f"strategy={strategy}", f"trainer.devices={devices}", *overrides)


def check_same(records: list[Record], reference: Record, done: int) -> None:
    """The resumed ranks trained on just the samples that were left, and ended at the same place."""
    for resumed in records:
        for a, b in zip(resumed.losses, reference.losses[done:], strict=True):
            assert a == pytest.approx(b, rel=1e-9)
        assert max(relative(resumed.final[name], tensor) for name, tensor in reference.final.items()) < 1e-9
        assert resumed.optimizer.keys() == reference.optimizer.keys()
        moments = [relative(resumed.optimizer[name], tensor) for name, tensor in reference.optimizer.items()]
        assert max(moments, default=0.0) < 1e-8


@pytest.fixture(scope="module")
def reference(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Record:
    return fit(task(tmp_path_factory.mktemp("whole"), small, 1))


@pytest.mark.parametrize(
    ("hook", "step", "done", "before", "after"),
    [
        ("on_train_batch_end", 5, 5, 1, 2),
        ("on_train_batch_end", 5, 5, 2, 1),
        ("on_train_batch_start", 5, 5, 1, 1),
        ("on_train_batch_end", STEPS_PER_EPOCH, STEPS_PER_EPOCH, 1, 1),
        ("on_validation_end", STEPS_PER_EPOCH, STEPS_PER_EPOCH, 1, 1),
        ("on_train_epoch_end", STEPS_PER_EPOCH, STEPS_PER_EPOCH, 2, 4),
        ("on_train_batch_end", 15, 15, 4, 2),
    ],
)
def test_goes_on_where_it_was(
    hook: str,
    step: int,
    done: int,
    before: int,
    after: int,
    reference: Record,
    pool: Pool,
    small: list[str],
    folder: Path,
) -> None:
    in_world(pool, before, die, task(folder, small, before), hook, step)
    resumed = in_world(pool, after, fit, task(folder, small, after, f"ckpt_path={folder}/died.ckpt"))
    check_same(resumed, reference, done)
    for k, batch in enumerate(reference.indices[done:]):
        assert sorted(index for rank in resumed for index in rank.indices[k]) == sorted(batch)


def test_metrics_have_one_row_per_step(reference: Record, small: list[str], folder: Path) -> None:
    cfg = task(folder, small, 1)
    with pytest.raises(Died):  # goes three steps further than what it saved
        fit(cfg, SaveOnce(5), SaveAndDie("on_train_batch_end", 8))
    fit(task(folder, small, 1, f"ckpt_path={folder}/saved.ckpt"))
    rows = (folder / "metrics.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(20))


class SaveOnce(L.Callback):
    """Saves a checkpoint at one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")


def test_half_accumulated_step_is_done_again(small: list[str], folder: Path) -> None:
    """Also with another number of micro-batches: without batch normalisation that is the same run."""
    plain = [*TASK, *MLP]
    reference = fit(compose(folder / "whole", *small, *plain))
    cfg = compose(folder, *small, *plain, "trainer.accumulate_grad_batches=2")
    with pytest.raises(Died):
        fit(cfg, SaveAndDieAtBatch(11))  # the first half of the sixth step
    resumed = fit(compose(folder, *small, *plain, f"ckpt_path={folder}/died.ckpt"))
    check_same([resumed], reference, done=5)


class SaveAndDieAtBatch(L.Callback):
    """Saves a checkpoint after the n-th micro-batch, then raises."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.number:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "died.ckpt")
            raise Died


def test_dropout_is_the_same_after_a_restart(small: list[str], folder: Path) -> None:
    dropping = [*TASK, *MLP, "model.dropout=0.5"]
    reference = fit(compose(folder / "whole", *small, *dropping))
    die(compose(folder, *small, *dropping), "on_train_batch_end", 5)
    check_same([fit(compose(folder, *small, *dropping, f"ckpt_path={folder}/died.ckpt"))], reference, done=5)


def test_loader_processes_that_fetch_ahead_change_nothing(small: list[str], folder: Path) -> None:
    plain = [*TASK, *MLP]
    reference = fit(compose(folder / "whole", *small, *plain))
    workers = [*plain, "data.num_workers=2"]
    die(compose(folder, *small, *workers), "on_train_batch_end", 5)
    check_same([fit(compose(folder, *small, *workers, f"ckpt_path={folder}/died.ckpt"))], reference, done=5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batch_size=64", "had data.batch_size=32, this one has 64"),
        ("seed=1", "had seed=0, this one has 1"),
        ("data.val_fraction=0.2", "had training pictures=360, this one has 320"),
    ],
)
def test_another_order_of_the_data_is_refused(override: str, message: str, small: list[str], folder: Path) -> None:
    die(compose(folder, *small, *TASK, *MLP), "on_train_batch_end", 5)
    with pytest.raises(UserError, match=message):
        fit(compose(folder, *small, *TASK, *MLP, override, f"ckpt_path={folder}/died.ckpt"))


def test_new_hyper_parameters_count(small: list[str], folder: Path) -> None:
    die(compose(folder, *small, *TASK), "on_train_batch_end", 5)
    changed = ["optimizer.lr=0.02", "optimizer.momentum=0.5", "scheduler=constant"]
    resumed = LearningRates()
    fit(compose(folder, *small, *TASK, *changed, f"ckpt_path={folder}/died.ckpt"), resumed)
    assert resumed.seen == [(pytest.approx(0.02), 0.5)] * 15


class LearningRates(L.Callback):
    """Notes the learning rate and the momentum of each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        group = trainer.optimizers[0].param_groups[0]
        self.seen.append((group["lr"], group["momentum"]))


def test_extended_run_takes_its_place_on_the_longer_schedule(small: list[str], folder: Path) -> None:
    fit(compose(folder, *small, *TASK, "trainer.max_steps=11"))
    longer, whole = LearningRates(), LearningRates()
    fit(compose(folder, *small, *TASK, f"ckpt_path={folder}/checkpoints/last.ckpt"), longer)
    fit(compose(folder / "whole", *small, *TASK), whole)
    assert longer.seen == [(pytest.approx(lr), momentum) for lr, momentum in whole.seen[11:]]


def test_a_worse_epoch_after_a_restart_does_not_replace_the_best(small: list[str], folder: Path) -> None:
    """The state of `best` is in `last.ckpt`, also that of the very epoch at whose end it was written."""
    fit(compose(folder, *small, *TASK, *MLP, "trainer.max_steps=11"))
    best = torch.load(folder / "checkpoints" / "best.ckpt")
    state = next(value for name, value in best["callbacks"].items() if "val/acc" in name)
    last = torch.load(folder / "checkpoints" / "last.ckpt")
    kept = next(value for name, value in last["callbacks"].items() if "val/acc" in name)
    assert kept["best_model_path"] == str(folder / "checkpoints" / "best.ckpt")
    assert kept["best_model_score"] is not None
    assert kept["best_model_score"] == state["best_model_score"]


def test_a_refused_resumption_changes_nothing(small: list[str], folder: Path) -> None:
    die(compose(folder, *small, *TASK, *MLP), "on_train_batch_end", 5)
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    with pytest.raises(UserError):
        fit(compose(folder, *small, *TASK, *MLP, "data.batch_size=64", f"ckpt_path={folder}/died.ckpt"))
    with pytest.raises(UserError, match="another `optimizer`"):
        fit(compose(folder, *small, *TASK, *MLP, "optimizer=adamw", f"ckpt_path={folder}/died.ckpt"))
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


def test_a_finished_run_is_only_tested_again(small: list[str], folder: Path) -> None:
    plain = [*TASK, *MLP]
    fit(compose(folder, *small, *plain, "trainer.max_steps=11"), test=True)
    before = (folder / "metrics.csv").read_text()
    again = [*plain, "trainer.max_steps=11", f"ckpt_path={folder}/checkpoints/last.ckpt"]
    assert fit(compose(folder, *small, *again), test=True).losses == []
    assert (folder / "metrics.csv").read_text() == before
