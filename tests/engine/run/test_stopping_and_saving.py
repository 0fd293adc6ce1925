"""Early stopping, the k best checkpoints, and the last one."""

from pathlib import Path

import lightning as L
import pytest
import torch

from src.engine.run.experiment import run
from src.engine.run.trainer import _configured_callbacks, build_trainer
from src.engine.utils.errors import UserError
from tests.support.commands import TWO
from tests.support.experiments import SHORT, SHORT_EPOCH
from tests.support.pool import Pool
from tests.support.runs import compose, fit

MLP = ["model=mlp", "model.hidden=[16]", "data.batch_size=32"]


def test_stops_without_improvement(pool: Pool, small: list[str], folder: Path) -> None:
    stopping = ["callbacks=[default,early_stopping]", "callbacks.early_stopping.patience=2", "optimizer.lr=0"]
    cfg = compose(folder, *small, *MLP, *stopping, *TWO, "trainer.max_epochs=20")
    pool.run(2, fit, cfg)
    assert torch.load(folder / "checkpoints" / "last.ckpt")["global_step"] == 3 * 11
    cfg.ckpt_path = f"{folder}/checkpoints/last.ckpt"
    for record in pool.run(2, fit, cfg):
        assert record.indices == [], "a run that was stopped early stays stopped"


STOPPING = ["experiment=parity", *SHORT, "model=mlp", "~model.width", "model.hidden=[16]", "trainer.max_epochs=20"]
STOPPING += ["trainer.max_steps=-1", "callbacks=[default,early_stopping]", "optimizer.lr=0"]


def test_larger_patience_continues_a_stopped_run(small: list[str], folder: Path) -> None:
    task = [*small, *STOPPING, "callbacks.early_stopping.patience"]
    fit(compose(folder, *task[:-1], f"{task[-1]}=1"))
    last = folder / "checkpoints" / "last.ckpt"
    assert torch.load(last)["global_step"] == 2 * SHORT_EPOCH
    resumed = fit(compose(folder, *task[:-1], f"{task[-1]}=3", f"ckpt_path={last}"))
    assert len(resumed.losses) == 2 * SHORT_EPOCH
    assert torch.load(last)["global_step"] == 4 * SHORT_EPOCH


def test_each_validation_counts_once(small: list[str], folder: Path) -> None:
    """A run that ended in mid-epoch has not validated there, so it resumes with its full patience."""
    task = [*small, *STOPPING, "callbacks.early_stopping.patience=2"]
    fit(compose(folder, *task, f"trainer.max_steps={SHORT_EPOCH + 3}"))
    last = folder / "checkpoints" / "last.ckpt"
    fit(compose(folder, *task, f"ckpt_path={last}"))
    assert torch.load(last)["global_step"] == 3 * SHORT_EPOCH


@pytest.mark.parametrize("option", ["patience=1", "divergence_threshold=2.0"], ids=lambda option: option[:-2])
def test_stopped_run_stays_stopped_and_keeps_its_rows(option: str, small: list[str], folder: Path) -> None:
    cfg = compose(folder, *small, *STOPPING, f"{'+' * ('threshold' in option)}callbacks.early_stopping.{option}")
    fit(cfg, test=True)
    rows = (folder / "metrics.csv").read_text()
    cfg.ckpt_path = f"{folder}/checkpoints/last.ckpt"
    assert fit(cfg, test=True).indices == []
    assert (folder / "metrics.csv").read_text() == rows


def test_stop_deferred_by_min_epochs_survives_a_restart(small: list[str], folder: Path) -> None:
    """A better score does not undo the decision to stop, neither in this process nor after a restart."""
    options = ["callbacks.early_stopping.patience=1", "+trainer.min_epochs=4"]
    task = [*small, *[word for word in STOPPING if word != "optimizer.lr=0"], *options]
    alone = fit(compose(folder / "alone", *task), ScriptedAccuracy([0.5, 0.4, 0.9, 0.9, 0.9, 0.9]))
    assert len(alone.losses) == 4 * SHORT_EPOCH
    fit(compose(folder / "killed", *task, f"trainer.max_steps={3 * SHORT_EPOCH}"), ScriptedAccuracy([0.5, 0.4, 0.9]))
    last = folder / "killed" / "checkpoints" / "last.ckpt"
    fit(compose(folder / "killed", *task, f"ckpt_path={last}"), ScriptedAccuracy([0.9, 0.9, 0.9]))
    assert torch.load(last)["global_step"] == 4 * SHORT_EPOCH


@pytest.mark.parametrize(
    ("without", "remedy"),
    [
        ("trainer.limit_val_batches=0", r" \(trainer.limit_val_batches=0\): set trainer.limit_val_batches=1.0, or"),
        ("data.val_fraction=0", r": give it validation samples \(data.val_fraction, for images\), or"),
    ],
)
def test_early_stopping_needs_validation(without: str, remedy: str, small: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match=rf"callbacks.early_stopping monitors val/acc, but .* no validation{remedy}"):
        fit(compose(folder, *small, *STOPPING, without))


def test_warns_of_a_best_checkpoint_without_validation(
    small: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = [*small, *MLP, "data.val_fraction=0", "trainer.max_epochs=1", "trainer.limit_train_batches=1"]
    for words, expected in (([], 1), (["callbacks.best=null"], 0)):
        caplog.clear()
        fit(compose(folder, *task, *words))
        assert sum("callbacks.best monitors val/acc" in message for message in caplog.messages) == expected
    assert (folder / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["best", "progress_bar", "timeline", "throughput", "checkpoint"]),
        (["callbacks=[default,ema]"], ["best", "progress_bar", "timeline", "throughput", "ema", "checkpoint"]),
        (["callbacks=top_k", "callbacks.throughput=null"], ["best", "progress_bar", "timeline", "checkpoint"]),
        (["callbacks=[none,ema]"], ["ema"]),
    ],
)
def test_choices_add_to_the_default_callbacks(words: list[str], names: list[str], folder: Path) -> None:
    cfg = compose(folder, *words, "trainer.enable_progress_bar=true")
    assert list(_configured_callbacks(cfg)) == [f"callbacks.{name}" for name in names]


def test_a_second_progress_bar_needs_the_first_one_left_out(folder: Path) -> None:
    words = ["+callbacks.bar._target_=lightning.pytorch.callbacks.RichProgressBar", "trainer.enable_progress_bar=true"]
    with pytest.raises(UserError, match=r"one progress bar: set callbacks.progress_bar=null$"):
        _configured_callbacks(compose(folder, *words))
    assert "callbacks.bar" in _configured_callbacks(compose(folder, *words, "callbacks.progress_bar=null"))


def test_no_progress_bar_among_the_callbacks_means_none(folder: Path) -> None:
    trainer = build_trainer(compose(folder, "callbacks.progress_bar=null", "trainer.enable_progress_bar=true"))
    assert trainer.progress_bar_callback is None


class ScriptedAccuracy(L.Callback):
    """Log given validation accuracies instead of the network's."""

    def __init__(self, scores: list[float]) -> None:
        self.scores = iter(scores)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.callback_metrics["val/acc"] = torch.tensor(next(self.scores))


def test_refuses_a_monitor_that_is_not_logged(small: list[str], folder: Path) -> None:
    for name, monitor in (("early_stopping", "val/ac"), ("best", "val/ac")):
        task = ["callbacks=[default,early_stopping]", f"callbacks.{name}.monitor={monitor}"]
        with pytest.raises(UserError, match="val/ac"):
            run(compose(folder / name, *small, *MLP, *task, "trainer.max_epochs=1"))


def test_keeps_the_k_best_checkpoints_and_the_last(small: list[str], folder: Path) -> None:
    cfg = compose(
        folder, *small, *MLP, "callbacks=[default,top_k]", "callbacks.best.save_top_k=2", "trainer.max_epochs=5"
    )
    fit(cfg)
    rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    column = rows[0].index("val/acc")
    accuracies = sorted((float(row[column]) for row in rows[1:] if row[column]), reverse=True)
    assert len(accuracies) == 5
    names = {file.stem for file in (folder / "checkpoints").iterdir()} - {"last", "previous"}
    kept = sorted((float(name.partition("-acc")[2]) for name in names), reverse=True)
    assert kept == pytest.approx(accuracies[:2], abs=1e-4)
    assert (folder / "checkpoints" / "last.ckpt").is_file()
