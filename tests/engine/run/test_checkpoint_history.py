"""Best checkpoints are saved after their validation, and survive a kill and a moved run folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

import onecurve
from tests.support.comparison import read_rows
from tests.support.experiments import SHORT, SHORT_EPOCH
from tests.support.interruption import die, run_on_ranks
from tests.support.pool import Pool
from tests.support.runs import compose, fit

TASK = [
    "experiment=parity",
    *SHORT,
    "model=mlp",
    "~model.width",
    "model.hidden=[16]",
    "trainer.max_epochs=3",
    "trainer.max_steps=-1",
    "data.source.train_size=200",
    "data.val_fraction=0.6",
    "optimizer.lr=0.3",  # so that scores go up and down
]
TWICE_AN_EPOCH = ["+trainer.val_check_interval=2", "callbacks=[default,top_k]", "callbacks.best.save_top_k=2"]


def scores(folder: Path) -> dict[int, float]:
    """Return the validation accuracies of a run by their steps, which metrics.csv counts from zero."""
    return {int(row["step"]) + 1: float(row["val/acc"]) for row in read_rows(folder) if row["val/acc"]}


def history(file: Path) -> dict[str, Any]:
    """Return the state of the callback `best` in a checkpoint, with the names of files instead of their paths."""
    states = torch.load(file)["callbacks"]
    state = next(state for name, state in states.items() if "val/acc" in name)
    state["best_k_models"] = {Path(path).name: float(score) for path, score in state["best_k_models"].items()}
    return {name: Path(value).name if isinstance(value, str) else value for name, value in state.items()}


@pytest.mark.parametrize(
    "when", [["trainer.check_val_every_n_epoch=2"], ["+trainer.val_check_interval=2", "trainer.max_steps=13"]]
)
def test_best_checkpoint_has_the_step_of_its_validation(when: list[str], small: list[str], folder: Path) -> None:
    fit(compose(folder, *small, *TASK, *when, "callbacks=[default,top_k]", "callbacks.best.save_top_k=-1"))
    validated = scores(folder)
    saved = {}
    for file in (folder / "checkpoints").glob("epoch*.ckpt"):
        checkpoint = torch.load(file)
        saved[checkpoint["global_step"]] = checkpoint["metrics"]["val/acc"]
    assert saved
    assert saved == validated


@pytest.mark.parametrize(("step", "devices"), [(11, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_kill_does_not_change_checkpoints(step: int, devices: int, pool: Pool, small: list[str], folder: Path) -> None:
    world = [f"trainer.devices={devices}", f"strategy={'ddp' if devices > 1 else 'auto'}"]
    task = [*small, *TASK, *TWICE_AN_EPOCH, *world, "callbacks.checkpoint.every_n_train_steps=3"]
    run_on_ranks(pool, devices, fit, compose(folder / "alone", *task))
    run_on_ranks(pool, devices, die, compose(folder / "killed", *task), "on_train_batch_end", step)
    last = folder / "killed" / "checkpoints" / "last.ckpt"
    run_on_ranks(pool, devices, fit, compose(folder / "killed", *task, f"ckpt_path={last}"))
    names, same = ({file.name for file in (folder / name / "checkpoints").iterdir()} for name in ("alone", "killed"))
    assert names == same
    for name in names:
        files = [folder / run / "checkpoints" / name for run in ("alone", "killed")]
        assert torch.load(files[0])["global_step"] == torch.load(files[1])["global_step"]
        assert history(files[0]) == history(files[1])


def test_moved_folder_keeps_its_best_checkpoint(small: list[str], folder: Path) -> None:
    """A score of one makes the saved epochs better than all that follow."""
    task = [*small, *TASK, "callbacks=[default,top_k]", "callbacks.best.save_top_k=2"]
    fit(compose(folder / "here", *task, "trainer.max_steps=10"))
    kept = {file.name for file in (folder / "here" / "checkpoints").glob("epoch*")}
    last = torch.load(folder / "here" / "checkpoints" / "last.ckpt")
    state = next(state for name, state in last["callbacks"].items() if "val/acc" in name)
    state["best_k_models"] = dict.fromkeys(state["best_k_models"], torch.tensor(1.0))
    torch.save(last, folder / "here" / "checkpoints" / "last.ckpt")
    (folder / "here").rename(folder / "there")
    fit(compose(folder / "there", *task, f"ckpt_path={folder}/there/checkpoints/last.ckpt"))
    assert not (folder / "here").exists()
    assert {file.name for file in (folder / "there" / "checkpoints").glob("epoch*")} == kept
    assert set(history(folder / "there" / "checkpoints" / "last.ckpt")["best_k_models"].values()) == {1.0}


def test_copied_checkpoint_starts_a_new_history(small: list[str], folder: Path) -> None:
    """An earlier version saved the state of a callback that does not exist any more."""
    fit(compose(folder / "here", *small, *TASK, f"trainer.max_steps={SHORT_EPOCH}"))
    last = torch.load(folder / "here" / "checkpoints" / "last.ckpt")
    last["callbacks"]["LastCheckpoint{'monitor': None}"] = {"best_model_path": "last.ckpt"}
    torch.save(last, folder / "copied.ckpt")
    fit(compose(folder / "there", *small, *TASK, f"ckpt_path={folder}/copied.ckpt"))
    assert (folder / "there" / "checkpoints" / "best.ckpt").is_file()


class Worsens(BoringModel):
    """Has its best epoch first, and a callback of its own that keeps the best."""

    def configure_callbacks(self) -> Any:
        return [ModelCheckpoint(monitor="val_loss", filename="best")]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch))


def test_the_best_of_a_module_survives_in_a_folder_with_another_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path is relative, and the run goes on in another working directory."""
    options: dict[str, Any] = {"accelerator": "cpu", "limit_train_batches": 2, "limit_val_batches": 1, "logger": False}
    for place, path in ((folder, "run"), (folder / "sub", "../run")):
        place.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(place)
        trainer = onecurve.Trainer(default_root_dir=path, max_epochs=1 + (path != "run"), **options)
        trainer.fit(Worsens(), ckpt_path="last")
        (state,) = (
            state
            for name, state in torch.load(folder / "run" / "checkpoints" / "last.ckpt")["callbacks"].items()
            if name.startswith("ModelCheckpoint")
        )
        assert (Path(state["best_model_path"]), state["best_model_score"]) == (Path(path, "checkpoints/best.ckpt"), 0)
    assert torch.load(folder / "run" / "checkpoints" / "best.ckpt")["epoch"] == 0
