"""Early stopping that a restart does not undo."""

from pathlib import Path

import lightning as L
import torch

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


def test_stopped_run_stays_stopped_and_keeps_its_rows(small: list[str], folder: Path) -> None:
    cfg = compose(folder, *small, *STOPPING, "+callbacks.early_stopping.divergence_threshold=2.0")
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


def test_a_metric_of_training_is_checked_at_the_end_of_an_epoch(small: list[str], folder: Path) -> None:
    options = ["monitor=train/loss", "mode=min", "patience=1"]
    words = [*STOPPING, *(f"callbacks.early_stopping.{word}" for word in options), "data.val_fraction=0"]
    words += ["callbacks.early_stopping.check_on_train_epoch_end=true", "callbacks.early_stopping.min_delta=10"]
    fit(compose(folder, *small, *words, "callbacks.best=null", "test=false"))
    assert torch.load(folder / "checkpoints" / "last.ckpt")["epoch"] == 1, "the first epoch and one without progress"


class ScriptedAccuracy(L.Callback):
    """Log given validation accuracies instead of the network's."""

    def __init__(self, scores: list[float]) -> None:
        self.scores = iter(scores)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.callback_metrics["val/acc"] = torch.tensor(next(self.scores))
