"""A module sees the world of its experiment in `self.trainer`, and nothing else of the trainer is another one."""

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import onecurve
from tests.support.comparison import TOLERANCE, distances
from tests.support.habits import VectorData, Vectors
from tests.support.pool import Pool
from tests.support.runs import compose, fit, fit_ranks

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
OWN += ["trainer.log_every_n_steps=1", "trainer.max_epochs=2", "+data._target_=tests.support.habits.VectorData"]
OWN += [f"+module._target_={__name__}.ScalesRate", "trainer.precision=64-true"]
HARDWARE = {"ddp": ["strategy=ddp"], "spawn": ["strategy=ddp_spawn"], "fsdp": ["strategy=fsdp"]}


class ScalesRate(Vectors):
    """Scales its learning rate by the number of processes, prints on rank zero, and ends its run."""

    def __init__(self) -> None:
        super().__init__()
        del self.teacher

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean(batch[0], batch[1], batch_idx)
        self.log("train/loss", loss, sync_dist=True)
        self.log("world", float(self.trainer.world_size * self.trainer.num_devices * self.trainer.num_nodes))
        self.log("batch_size", float(self.trainer.train_dataloader.batch_size))
        self.log("sum_of_ranks", float(self.global_rank), reduce_fx="sum", sync_dist=True)
        self.log("zeros", float(self.trainer.is_global_zero), reduce_fx="sum", sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        loaders = {"train": self.trainer.train_dataloader, "val": self.trainer.val_dataloaders}
        for name, loader in loaders.items():
            means = [inputs.mean() + len(inputs) for inputs, _ in loader or []]
            self.log(f"read/{name}", torch.stack(means or [torch.zeros(())]).sum())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = self.trainer.global_step == 6

    def configure_optimizers(self) -> torch.optim.Optimizer:
        rate = 0.01 * self.trainer.world_size * self.trainer.num_devices
        os.environ["OF_LIBRARY"] = "set by the module"
        ranks = int(os.environ.get("WORLD_SIZE", 1)) * (dist.get_world_size() if dist.is_initialized() else 1)
        return torch.optim.Adam(self.net.parameters(), rate * ranks)


class Hooks(L.Callback):
    """Records in which hooks callbacks get the trainer of the module."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("on_") or not callable(found):
            return found

        def hook(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            SEEN[type(trainer).__name__].add(name)
            return found(trainer, *args, **kwargs)

        return hook


SEEN: dict[str, set[str]] = defaultdict(set)


def test_callbacks_get_the_trainer_of_the_module_in_three_hooks(folder: Path) -> None:
    SEEN.clear()
    fit(compose(folder, *OWN), Hooks())
    assert SEEN["ModuleTrainer"] == {"on_before_backward", "on_after_backward", "on_before_optimizer_step"}
    assert len(SEEN["Trainer"]) > 10


@pytest.mark.parametrize(
    "hardware", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "spawn"))]
)
def test_learns_the_same_on_ranks(hardware: str, pool: Pool, folder: Path) -> None:
    one = fit(compose(folder / "one", *OWN))
    assert len(one.losses) == 6
    for record in fit_ranks(compose(folder / "two", *OWN, *HARDWARE[hardware], "trainer.devices=2"), pool):
        assert max(distances(record, one)) < TOLERANCE
        assert [record.metrics[name] for name in ("world", "sum_of_ranks", "zeros")] == [1, 1, 1]
        for name in ("read/train", "read/val"):  # by a hook, from the trainer's loaders
            assert record.metrics[name] == one.metrics[name] > 32
        assert record.metrics["batch_size"] == one.metrics["batch_size"] == 32, "that of the loader"


def test_sees_the_virtual_ranks(pool: Pool, folder: Path) -> None:
    words = [*OWN, "bit_exact=true", "virtual_ranks=2"]
    one = fit(compose(folder / "one", *words))
    two = fit_ranks(compose(folder / "two", *words, *HARDWARE["ddp"], "trainer.devices=2"), pool)
    assert max(abs(ours - theirs) for ours, theirs in zip(one.losses, two[0].losses, strict=True)) == 0
    assert one.metrics["world"] == 4
    for kind in (one, two[0]):
        assert all(torch.equal(kind.final[name], value) for name, value in one.final.items())


class AsksForValidation(VectorData):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        assert self.trainer
        self.enabled = self.trainer.enable_validation


@pytest.mark.parametrize("limit", [None, 0])
def test_a_data_module_knows_in_its_setup_whether_a_validation_comes(
    limit: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_LIBRARY", "")
    quiet: Any = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = onecurve.Trainer(default_root_dir=folder, max_steps=1, limit_val_batches=limit, **quiet)
    data = AsksForValidation()
    trainer.fit(ScalesRate(), datamodule=data)
    assert data.enabled is trainer.enable_validation is (limit is None)
    assert os.environ["OF_LIBRARY"] == "set by the module", "only the variables of ranks are others for a while"
