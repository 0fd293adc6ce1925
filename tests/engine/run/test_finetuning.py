"""Weights that a callback unfreezes while a run trains, and their parameter group, are as before in a resumed run."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from tests.support.comparison import TOLERANCE, check_same_rows, relative
from tests.support.interruption import die, run_on_ranks
from tests.support.pool import Pool, RankFailed
from tests.support.runs import Record, compose, fit

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
OWN += ["trainer.log_every_n_steps=1", "trainer.max_epochs=3", "+data._target_=tests.support.habits.VectorData"]
OWN += [f"+module._target_={__name__}.Tuned", "trainer.precision=64-true"]
TWO = ["strategy=ddp", "trainer.devices=2"]
HARDWARE = {"one": [], "ddp": TWO, "fsdp": ["strategy=fsdp", TWO[1]], "bits": [*TWO, "bit_exact=true"]}


class Tuned(L.LightningModule):
    """A backbone and a head; the optimizer begins with the weights that are trainable."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        self.log("trainable", float(sum(weight.requires_grad for weight in self.parameters())))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.head(self.backbone(batch[0])), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([weight for weight in self.parameters() if weight.requires_grad], 0.01)


class Unfreezing(L.Callback):
    """Unfreezes the backbone after the first epoch, without Lightning's callback."""

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.backbone.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": pl_module.backbone.parameters(), "lr": 0.003})


CALLBACKS = {
    "lightning": "{_target_: lightning.pytorch.callbacks.BackboneFinetuning, unfreeze_backbone_at_epoch: 1, "
    "backbone_initial_lr: 0.003}",
    "own": f"{{_target_: {__name__}.Unfreezing}}",
}

PLACES = {  # in three epochs of four steps
    "epoch of the unfreezing": ("on_train_batch_start", 6),
    "end of a validation": ("on_validation_end", 8),
    "end of an epoch": ("on_train_epoch_end", 8),
    "start of an epoch": ("on_train_batch_start", 8),
    "later epoch": ("on_train_batch_start", 9),
}


UNFREEZING = "epoch of the unfreezing"  # one process has each place, and two have this one
ROWS = [
    pytest.param(
        hardware,
        callback,
        place,
        id=f"{hardware}-{callback}-{place}",
        marks=[] if hardware == "one" or (hardware, place) == ("ddp", UNFREEZING) else pytest.mark.slow,
    )
    for hardware in HARDWARE
    for callback in CALLBACKS
    for place in PLACES
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Record]:
    """Return a function that trains on one process without a stop, once for each choice of options."""

    @functools.cache
    def run(*words: str) -> Record:
        return fit(compose(tmp_path_factory.mktemp("whole"), *words))

    return run


@pytest.mark.parametrize(("hardware", "callback", "place"), ROWS)
def test_resumed_and_undisturbed_runs_agree(
    hardware: str, callback: str, place: str, undisturbed: Callable[..., Record], pool: Pool, folder: Path
) -> None:
    """The run dies in the epoch that begins with the unfreezing, and so begins again, or in the next one."""
    words, devices = [*OWN, f"+callbacks.finetune={CALLBACKS[callback]}"], 2 if hardware != "one" else 1
    whole = undisturbed(*words, *(["bit_exact=true"] if hardware == "bits" else []))
    assert relative(whole.initial["backbone.0.weight"], whole.final["backbone.0.weight"]) > 0.001
    words += HARDWARE[hardware]
    run_on_ranks(pool, devices, die, compose(folder / "run", *words), *PLACES[place])
    resumed = compose(folder / "run", *words, f"ckpt_path={folder}/run/died.ckpt")
    for record in run_on_ranks(pool, devices, fit, resumed):
        assert all(relative(record.final[name], value) < TOLERANCE for name, value in whole.final.items())
    check_same_rows(folder / "run", whole.file.parent)


def test_a_sharded_optimizer_refuses_lightnings_callback(pool: Pool, folder: Path) -> None:
    words = [*OWN, *TWO, f"+callbacks.finetune={CALLBACKS['lightning']}", "strategy.shard_optimizer=true"]
    with pytest.raises(RankFailed, match=r"UserError: strategy\.shard_optimizer=true divides .* strategy=fsdp"):
        pool.run(2, fit, compose(folder, *words))


def test_a_continued_run_keeps_what_its_configuration_freezes(folder: Path) -> None:
    """The checkpoint is of a run that has unfrozen nothing."""
    die(compose(folder, *OWN), "on_train_batch_start", 6)
    words = [*OWN, f"+callbacks.finetune={CALLBACKS['lightning']}", "callbacks.finetune.unfreeze_backbone_at_epoch=9"]
    record = fit(compose(folder, *words, f"ckpt_path={folder}/died.ckpt"))
    assert torch.equal(record.initial["backbone.0.weight"], record.final["backbone.0.weight"])
    assert not torch.equal(record.initial["head.weight"], record.final["head.weight"])


class Blocks(Tuned):
    """The same as one network, which a pipeline divides into stages."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.net(batch[0]), batch), sync_dist=True)


class FirstLayer(BaseFinetuning):
    """Unfreezes the first layer after the first epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.003)


@pytest.mark.parametrize("places", [("pipeline", "one"), ("one", "pipeline")])
def test_lightnings_callback_goes_on_with_the_weights_of_all_stages(
    places: tuple[str, str], undisturbed: Callable[..., Record], pool: Pool, folder: Path
) -> None:
    words = [*(word for word in OWN if "Tuned" not in word), f"+module._target_={__name__}.Blocks"]
    words.append(f"+callbacks.finetune._target_={__name__}.FirstLayer")
    whole, hardware = undisturbed(*words), {"one": [], "pipeline": ["strategy=pipeline", TWO[1]]}
    first = compose(folder, *words, *hardware[places[0]])
    run_on_ranks(pool, first.trainer.devices, die, first, "on_train_batch_start", 6)
    second = compose(folder, *words, *hardware[places[1]], f"ckpt_path={folder}/died.ckpt")
    for record in run_on_ranks(pool, second.trainer.devices, fit, second):
        assert all(relative(value, whole.final[name]) < TOLERANCE for name, value in record.final.items())
