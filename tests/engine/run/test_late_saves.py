"""Callbacks of Lightning that save, stop or search: what a run that goes on has of them, and what is refused."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

import onecurve
from onecurve.checkpoint.newest import newest_checkpoint
from onecurve.errors import UserError
from onecurve.run.saving import LastCheckpoint


class Taught(BoringModel):
    """Learns from a teacher that the hook of a batch moves."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(32, 2).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch) - self.teacher(batch) - 1).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for mean, weight in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            mean.data.lerp_(weight.data, 0.5)


class Dies(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4 and trainer.ckpt_path is None:
            raise RuntimeError("died")


class Validated(BoringModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("x", self(batch).square().mean())


class Named(BoringModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/x", self(batch).square().mean())


def fit(folder: Path, *callbacks: L.Callback, module: Taught | None = None, **options: Any) -> dict[str, Tensor]:
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "seed": 0, "callbacks": [*callbacks]}
    given |= {"enable_progress_bar": False, "enable_model_summary": False, **options}
    trainer = onecurve.Trainer(default_root_dir=folder, **given)
    module = module or Taught()
    trainer.fit(module, DataLoader(RandomDataset(32, 64), batch_size=8), ckpt_path="last")
    assert "on_train_batch_end" not in vars(module)
    return module.state_dict()


@pytest.mark.parametrize("bit_exact", [False, True])
def test_a_saved_step_has_what_the_hook_of_the_module_changes(bit_exact: bool, folder: Path) -> None:
    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)

    whole = fit(folder / "whole", saves(), bit_exact=bit_exact)
    with pytest.raises(RuntimeError, match="died"):
        fit(folder / "died", saves(), Dies(), bit_exact=bit_exact)
    resumed = fit(folder / "died", saves(), bit_exact=bit_exact)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


class CountsTransfers(Taught):
    transfers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("transfers", torch.zeros(()))
        self.seen: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.transfers))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers += 1
        return batch


def test_a_saved_step_has_nothing_of_the_next_one(folder: Path) -> None:
    module = CountsTransfers()
    fit(folder, ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1), module=module)
    saved = [torch.load(folder / f"step={step}.ckpt")["state_dict"]["transfers"].item() for step in range(1, 8)]
    assert saved == module.seen[:7]


class Skips(Taught):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


def test_the_skipped_rest_of_an_epoch_does_not_count(folder: Path) -> None:
    fit(folder, module=Skips(), max_epochs=3)
    position = torch.load(folder / "checkpoints" / "last.ckpt")["position"]
    assert (position["epoch"], position["epoch_steps"], position["steps"]) == (3, 0, 9)


class Shrinks(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        assert self.trainer
        return DataLoader(RandomDataset(32, 64 if self.trainer.current_epoch == 0 else 40), batch_size=8)


class SavesAtStart(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir, f"{trainer.current_epoch}.ckpt"))


def test_the_start_of_an_epoch_with_other_data_is_its_position(folder: Path) -> None:
    trainer = onecurve.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[SavesAtStart()],
    )
    trainer.fit(Taught(), datamodule=Shrinks())
    position = torch.load(folder / "1.ckpt")["position"]
    assert (position["epoch"], position["epoch_steps"], position["steps"]) == (1, 0, 8)


def test_a_save_as_an_epoch_goes_on_has_its_position(folder: Path) -> None:
    saved = []
    for steps in (11, 13):
        fit(folder, SavesAtStart(), max_epochs=-1, max_steps=steps)
        saved.append(torch.load(folder / "1.ckpt")["position"])
    assert [(one["epoch"], one["epoch_steps"], one["steps"]) for one in saved] == [(1, 0, 8), (1, 3, 11)]


class FailsInSchedule(Taught):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.trainer.global_step == 4:
            raise RuntimeError("no rate")

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        return optimizers, [{"scheduler": one, "interval": "step"} for one in schedulers]


def test_a_step_whose_schedule_fails_counts(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="no rate"):
        fit(folder, OnExceptionCheckpoint(folder, "failed"), module=FailsInSchedule())
    saved = torch.load(folder / "failed.ckpt")
    assert (saved["position"]["epoch_steps"], saved["position"]["steps"], saved["global_step"]) == (4, 4, 4)


def test_a_best_checkpoint_in_a_folder_of_its_own_goes_on(folder: Path) -> None:
    saver = ModelCheckpoint(monitor="val/x", filename="{epoch}-{val/x:.2f}")
    trainer = onecurve.Trainer(accelerator="cpu", default_root_dir=folder, max_epochs=1, callbacks=[saver])
    module, loader = Named(), DataLoader(RandomDataset(32, 64), batch_size=8)
    trainer.fit(module, loader, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader, loader, ckpt_path="best")
    assert trainer.current_epoch == 2


class FailsToMove(Taught):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.global_step == 7:
            raise RuntimeError("no memory")
        return batch


def test_the_last_batch_that_is_not_moved_is_no_step(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="no memory"):
        fit(folder, OnExceptionCheckpoint(folder, "failed"), module=FailsToMove())
    position = torch.load(folder / "failed.ckpt")["position"]
    assert (position["epoch"], position["epoch_steps"], position["steps"]) == (0, 7, 7)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_saved_step_has_the_best_one_of_its_validation(is_first: bool, folder: Path) -> None:
    of_steps = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    best = ModelCheckpoint(folder, "best", monitor="x")
    savers = [of_steps, best] if is_first else [best, of_steps]
    trainer = onecurve.Trainer(
        accelerator="cpu", default_root_dir=folder, max_epochs=1, val_check_interval=4, callbacks=savers
    )
    loader = DataLoader(RandomDataset(32, 64), batch_size=8)
    trainer.fit(Validated(), loader, loader)
    saved = torch.load(folder / "step=4.ckpt", weights_only=False)["callbacks"][best.state_key]
    assert saved["best_model_path"] == str(folder / "best.ckpt")


def test_a_run_that_has_stopped_within_an_epoch_is_evaluated_in_it(folder: Path) -> None:
    epochs = []
    for _ in range(2):
        stops = EarlyStopping("x", patience=1, min_delta=100)
        trainer = onecurve.Trainer(
            accelerator="cpu", default_root_dir=folder, max_epochs=3, val_check_interval=6, callbacks=[stops]
        )
        loader = DataLoader(RandomDataset(32, 64), batch_size=8)
        trainer.fit(Validated(), loader, DataLoader(RandomDataset(32, 8), batch_size=8), ckpt_path="last")
        epochs.append(trainer.current_epoch)
    assert epochs[0] == epochs[1]


def test_a_checkpoint_of_an_exception_that_did_not_come(folder: Path) -> None:
    fit(folder, OnExceptionCheckpoint(folder / "none"))
    assert not (folder / "none").exists()


class Worsens(Validated):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("x", float(self.global_step))


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_last_checkpoint_after_nothing_better_goes_on(weights_only: bool, folder: Path) -> None:
    def fit_epochs(name: str, epochs: int) -> dict[str, Tensor]:
        best = ModelCheckpoint(monitor="x", save_last=True, save_weights_only=weights_only)
        callbacks: list[L.Callback] = [EMAWeightAveraging(decay=0.9), best]
        trainer = onecurve.Trainer(
            accelerator="cpu", devices=1, default_root_dir=folder / name, max_epochs=epochs, callbacks=callbacks
        )
        module, loader = Worsens(), DataLoader(RandomDataset(32, 64), batch_size=8)
        trainer.fit(module, loader, DataLoader(RandomDataset(32, 8), batch_size=8), ckpt_path="last")
        return module.state_dict()

    whole = fit_epochs("whole", 3)
    for epochs in (1, 2):
        fit_epochs("parts", epochs)
    assert "position" in torch.load(folder / "parts" / "checkpoints" / "last.ckpt")
    assert all(torch.equal(value, whole[name]) for name, value in fit_epochs("parts", 3).items())


def test_weights_alone_are_the_average_at_the_end(folder: Path) -> None:
    """As in Lightning: no run goes on from them."""
    saver = ModelCheckpoint(save_top_k=0, save_last=True, save_weights_only=True)
    trainer = onecurve.Trainer(
        accelerator="cpu", default_root_dir=folder, max_epochs=1, callbacks=[EMAWeightAveraging(decay=0.9), saver]
    )
    module = Validated()
    trainer.fit(module, DataLoader(RandomDataset(32, 64), batch_size=8))
    saved = torch.load(folder / "checkpoints" / "last-weights.ckpt")["state_dict"]
    whole = torch.load(folder / "checkpoints" / "last.ckpt")["current_model_state"]
    for name, value in module.state_dict().items():
        assert torch.equal(saved[name], value)
        assert not torch.equal(saved[name], whole[name])


def test_a_fit_that_is_refused_after_one_that_trained_saves_nothing(folder: Path) -> None:
    saver = OnExceptionCheckpoint(folder, "failed")
    trainer = onecurve.Trainer(accelerator="cpu", default_root_dir=folder, max_epochs=1, callbacks=[saver])
    trainer.fit(Validated(), DataLoader(RandomDataset(32, 64), batch_size=8))
    with pytest.raises(UserError, match=r"return a torch DataLoader"):
        trainer.fit(Validated(), [1], ckpt_path="last")
    assert not (folder / "failed.ckpt").exists()


class FailsInSanityCheck(Taught):
    def on_validation_start(self) -> None:
        raise UserError("no validation")


@pytest.mark.parametrize("options", [{"virtual_ranks": 8, "bit_exact": True}, {"num_sanity_val_steps": 1}])
def test_an_exception_before_training_is_shown_and_saves_nothing(options: dict[str, Any], folder: Path) -> None:
    loaders = DataLoader(RandomDataset(32, 64), batch_size=4), DataLoader(RandomDataset(32, 8), batch_size=8)
    saver, module = OnExceptionCheckpoint(folder, "failed"), FailsInSanityCheck()
    trainer = onecurve.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, callbacks=[saver], **options)
    with pytest.raises(UserError, match=r"no validation|must divide"):
        trainer.fit(module, *loaders)
    assert not (folder / "failed.ckpt").exists()


@pytest.mark.parametrize(
    "options", [{"bit_exact": True}, {"accumulate_grad_batches": 2}, {"strategy": "ddp", "devices": 2}]
)
def test_a_search_with_the_loss_of_a_part_is_refused(options: dict[str, Any], folder: Path) -> None:
    with pytest.raises(UserError, match="LearningRateFinder follows the loss of rank zero's samples"):
        fit(folder, LearningRateFinder(), **options)


class Sums(BoringModel):
    """Follows the sum of an epoch, which it resets at the end, and lowers its rate when that grows."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr, self.seen = lr, nn.Buffer(torch.zeros(()))
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch).square().mean()
        self.seen.add_(loss.detach())
        self.log("train_loss", loss, on_epoch=True)
        return loss * (1 + self.seen)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch).square().mean() * (-1) ** self.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.seen.zero_()
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def fit_sums(
    folder: Path, *callbacks: L.Callback, ckpt_path: Any = None, module: Any = None, **options: Any
) -> tuple[Any, L.Trainer]:
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 6, "seed": 0, "callbacks": [*callbacks]}
    given |= {"enable_progress_bar": False, "enable_model_summary": False, **options}
    trainer = onecurve.Trainer(default_root_dir=folder, **given)
    module, loader = module or Sums(), DataLoader(RandomDataset(32, 32), batch_size=8)
    trainer.fit(module, loader, loader, ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.parametrize("options", [{"every_n_train_steps": 4}, {"monitor": "val_loss", "every_n_epochs": 2}])
def test_what_is_saved_at_the_end_of_an_epoch_has_that_end(options: dict[str, Any], folder: Path) -> None:
    """Its validation, the module's hooks and the step of the schedule, which a run that goes on does not repeat."""
    saves = ModelCheckpoint(filename="{step}", save_top_k=-1, save_on_train_epoch_end=False, **options)
    whole, _ = fit_sums(folder / "whole", saves)
    assert len({*whole.rates}) > 2
    for step in (8, 16):
        (folder / f"{step}").mkdir()
        file = folder / "whole" / "checkpoints" / f"step={step}.ckpt"
        resumed, trainer = fit_sums(folder / f"{step}", ckpt_path=file)
        assert resumed.rates == whole.rates[step // 4 :]
        assert torch.equal(resumed.layer.weight, whole.layer.weight)
        assert trainer.global_step == 24


class StepsWithin(Sums):
    """Lowers its rate by the loss of each step, and once more in a validation within the epoch."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def on_train_epoch_end(self) -> None:
        pass

    def on_validation_end(self) -> None:
        if self.interval == "epoch" and not self.trainer.sanity_checking:
            self.optimizers().param_groups[0]["lr"] *= 0.9

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["lr_scheduler"] |= {"interval": self.interval, "monitor": "train_loss_step", "strict": False}
        return found


@pytest.mark.parametrize("of_validation", [False, True])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_what_is_saved_within_an_epoch_has_the_whole_step(interval: str, of_validation: bool, folder: Path) -> None:
    """Its validation, with the hook of the module that comes last, and the step of a schedule."""
    options: dict[str, Any] = {"val_check_interval": 2, "max_epochs": 3}
    when: dict[str, Any] = {"monitor": "val_loss"} if of_validation else {"every_n_train_steps": 2}
    saves = ModelCheckpoint(filename="{step}", save_top_k=-1, save_on_train_epoch_end=False, **when)
    whole, _ = fit_sums(folder / "whole", saves, module=StepsWithin(interval), **options)
    assert len({*whole.rates}) > 2
    for step in (2, 6):
        (folder / f"{step}").mkdir()
        file = folder / "whole" / "checkpoints" / f"step={step}.ckpt"
        resumed, _ = fit_sums(folder / f"{step}", ckpt_path=file, module=StepsWithin(interval), **options)
        assert resumed.rates == whole.rates[step:]
        assert torch.equal(resumed.layer.weight, whole.layer.weight)


class Fails(L.Callback):
    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == 8:
            raise RuntimeError("failed")


def test_a_step_is_saved_before_the_validation_that_fails(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves = ModelCheckpoint(filename="{step}", every_n_train_steps=4, save_top_k=-1)
    with pytest.raises(RuntimeError, match="failed"):
        fit_sums(folder, saves, Fails())
    assert {"step=4.ckpt", "step=8.ckpt"} <= {file.name for file in (folder / "checkpoints").iterdir()}
    assert not {"on_train_batch_end", "on_validation_end", "on_train_epoch_end"} & vars(saves).keys()
    for step in (4, 8):
        assert "this run leaves out" not in caplog.text
        fit_sums(folder, ckpt_path=folder / "checkpoints" / f"step={step}.ckpt", max_epochs=2)
    assert "step=8.ckpt was saved before the validation and the hooks at the end of epoch 1, which this" in caplog.text


class StopsAlike(EarlyStopping):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.wait_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["count"]


def test_a_stop_by_a_callback_with_a_state_of_its_own(folder: Path) -> None:
    _, trainer = fit_sums(folder, StopsAlike("val_loss", patience=1), max_epochs=9)
    _, again = fit_sums(folder, StopsAlike("val_loss", patience=1), max_epochs=9, ckpt_path="last")
    assert again.global_step > trainer.global_step, "it decides anew"


def test_a_run_that_has_stopped_early_stays_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stops(patience: int) -> EarlyStopping:
        return EarlyStopping("val_loss", patience=patience)

    _, trainer = fit_sums(folder, stops(1), max_epochs=9)
    assert trainer.global_step < 36
    _, again = fit_sums(folder, stops(1), max_epochs=9, ckpt_path="last")
    assert (again.global_step, again.current_epoch) == (trainer.global_step, trainer.current_epoch)
    assert "EarlyStopping has ended this run (Monitored metric val_loss did not improve" in caplog.text
    _, longer = fit_sums(folder, stops(4), max_epochs=9, ckpt_path="last")
    assert longer.global_step > trainer.global_step


def test_a_rate_that_was_found_is_that_of_the_module_when_it_goes_on(folder: Path) -> None:
    found, _ = fit_sums(folder, LearningRateFinder(num_training_steps=20, early_stop_threshold=None), max_epochs=6)
    assert found.lr != 0.1
    again, _ = fit_sums(folder, LearningRateFinder(), max_epochs=7, ckpt_path="last")
    assert again.lr == found.lr
    assert fit_sums(folder, max_epochs=8, ckpt_path="last")[0].lr == found.lr


class OfClass(Sums):
    """Its rate is one of the class, under another name."""

    my_rate = 0.1

    def __init__(self) -> None:
        super().__init__()
        del self.lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.my_rate)


def test_a_rate_that_was_found_goes_on_whatever_its_name(folder: Path) -> None:
    finder = LearningRateFinder(num_training_steps=20, early_stop_threshold=None, attr_name="my_rate")
    found, _ = fit_sums(folder, finder, module=OfClass())
    again, _ = fit_sums(folder, max_epochs=7, ckpt_path="last", module=OfClass())
    assert again.my_rate == found.my_rate != 0.1


def test_data_that_would_be_loaded_in_other_epochs_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit_sums(folder, max_epochs=1, reload_dataloaders_every_n_epochs=2)
    for epochs, warnings in ((2, 1), (3, 0)):
        caplog.clear()
        fit_sums(folder, max_epochs=epochs, reload_dataloaders_every_n_epochs=2, ckpt_path="last")
        assert sum("counts from epoch 1, in which this run goes on" in one for one in caplog.messages) == warnings


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_limit_of_predictions_counts_batches(accumulate: int, folder: Path) -> None:
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False}
    given |= {"accumulate_grad_batches": accumulate, "limit_predict_batches": 2}
    trainer = onecurve.Trainer(default_root_dir=folder, **given)
    predicted = trainer.predict(Sums(), DataLoader(RandomDataset(32, 64), batch_size=8))
    assert sum(map(len, predicted)) == 16


class DiesInStep(L.Callback):
    """Raises between the optimizer's step and its count."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 8 and trainer.ckpt_path is None:
            raise RuntimeError("died")


def test_a_run_goes_on_from_the_latest_step_that_a_callback_has_saved(folder: Path) -> None:
    """Not from last.ckpt of the epoch before, nor from a file that was saved after an error, or has weights only."""
    named: dict[str, Any] = {"save_top_k": -1, "every_n_train_steps": 3, "filename": "{step}"}

    def saves() -> list[ModelCheckpoint]:
        weights = ModelCheckpoint(**named | {"every_n_train_steps": 1, "filename": "weights"}, save_weights_only=True)
        at_error = ModelCheckpoint(**named | {"every_n_train_steps": 100, "filename": "error"}, save_on_exception=True)
        return [ModelCheckpoint(**named), weights, at_error]

    expected, _ = fit_sums(folder / "one", *saves())
    with pytest.raises(RuntimeError, match="died"):
        fit_sums(folder / "two", DiesInStep(), *saves())
    files = folder / "two" / "checkpoints"
    assert {"last.ckpt", "error.ckpt", "step=6.ckpt"} <= {file.name for file in files.iterdir()}
    assert newest_checkpoint(folder / "two") == files / "step=6.ckpt"
    module, trainer = fit_sums(folder / "two", DiesInStep(), *saves(), ckpt_path="last")
    assert trainer.global_step == 24
    assert all(torch.equal(module.state_dict()[name], value) for name, value in expected.state_dict().items())
    for file in files.glob("*.ckpt"):
        if not file.name.startswith("weights"):
            file.unlink()
    with pytest.raises(UserError, match="ckpt_path has weights only"):
        fit_sums(folder / "two", ckpt_path="last")


class DiesInSchedule(torch.optim.lr_scheduler.ReduceLROnPlateau):
    def step(self, *args: Any, **named: Any) -> None:
        if self.last_epoch == 5:
            raise RuntimeError("died")
        super().step(*args, **named)


def test_a_step_without_that_of_its_schedule_is_not_gone_on_from(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(filename="{step}", save_top_k=-1, every_n_train_steps=3)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.lr_scheduler, "ReduceLROnPlateau", DiesInSchedule)
        with pytest.raises(RuntimeError, match="died"):
            fit_sums(folder, saves(), module=StepsWithin("step"))
    files = folder / "checkpoints"
    assert (files / "step=6.ckpt").exists()
    assert newest_checkpoint(folder) == files / "last.ckpt"
    fit_sums(folder, saves(), module=StepsWithin("step"), ckpt_path=files / "step=6.ckpt")
    assert "step=6.ckpt was saved before the end of step 6, which this run leaves out" in caplog.text


class DiesInValidation(L.Callback):
    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 8 and trainer.ckpt_path is None:
            raise RuntimeError("died")


class EndsEpochs(Validated):
    """Counts the validations and epochs that have ended."""

    ends: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ends", torch.zeros(2))

    def on_validation_epoch_end(self) -> None:
        self.ends[0] += 1

    def on_train_epoch_end(self) -> None:
        self.ends[1] += 1


@pytest.mark.parametrize("batches", [8, 16], ids=["at the end of an epoch", "within an epoch"])
def test_a_validation_that_was_not_reached_is_not_left_out(batches: int, folder: Path) -> None:
    """A file of the step before it is there, and last.ckpt of an earlier step."""
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "num_sanity_val_steps": 0}
    given |= {"val_check_interval": 4, "enable_progress_bar": False, "enable_model_summary": False}
    ends, loader = [], DataLoader(RandomDataset(32, 8 * batches), batch_size=8)
    for name, dies in (("whole", []), ("died", [DiesInValidation()]), ("died", [])):
        last = LastCheckpoint(str(folder / name / "checkpoints"), every_n_train_steps=6)
        saves = [ModelCheckpoint(every_n_train_steps=4, save_top_k=-1), last]
        trainer = onecurve.Trainer(default_root_dir=folder / name, callbacks=[*saves, *dies], **given)
        module = EndsEpochs()
        with pytest.raises(RuntimeError, match="died") if dies else nullcontext():
            trainer.fit(module, loader, loader, ckpt_path="last")
        ends.append(module.ends.tolist())
    assert ends[0] == ends[2]


def test_the_rows_of_a_saved_step_are_synced_like_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that fails loses what is not synced, and a run that goes on would lack these rows in silence."""
    synced, fsync, file = list[int](), os.fsync, folder / "metrics.csv"

    def record(descriptor: int) -> None:
        fsync(descriptor)
        if file.exists() and os.fstat(descriptor).st_ino == file.stat().st_ino:
            synced.append(len(file.read_text().splitlines()) - 1)

    monkeypatch.setattr(os, "fsync", record)
    fit_sums(folder, max_epochs=2, log_every_n_steps=2)
    assert synced == [3, 5], "at the end of each epoch, of the first and each second step"
