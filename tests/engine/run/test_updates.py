"""What people write around the step of an optimizer: norms by hand, hooks of weights, late layers, schedules."""

import copy
import logging
import os
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

import onecurve
from onecurve.errors import UserError
from onecurve.run.saving import LastCheckpoint
from tests.support.pool import Pool, RankFailed


class Net(L.LightningModule):
    """A network of two blocks, in float64, whose loss divides by samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 2))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.5)


class ClipsByNumber(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = sum(weight.grad.norm().item() ** 2 for weight in self.parameters() if weight.grad is not None) ** 0.5
        for weight in self.parameters():
            assert weight.grad is not None
            weight.grad.mul_(min(1.0, 0.01 / norm))


class Grows(Net):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            layer = nn.Linear(2, 2).double()
            self.net.append(layer)
            self.optimizers().add_param_group({"params": layer.parameters()})


class ClampsIfLarge(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for weight in self.parameters():
            assert weight.grad is not None
            if (weight.grad.abs() >= 0.02).any():  # of which one rank has none in its shard
                weight.grad.mul_(0.1)


class UsesMuon(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([weight for weight in self.net.parameters() if weight.ndim == 2])


class MakesTensorOfNorms(Net):
    """As `lightning.pytorch.utilities.grad_norm`."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.tensor([weight.grad.norm() for weight in self.parameters() if weight.grad is not None])


def clamp(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.clamp_(-0.01, 0.01)


class ClampsLate(Net):
    def __init__(self) -> None:
        super().__init__()
        for weight in self.parameters():
            weight.register_post_accumulate_grad_hook(clamp)


class Scaled(torch.optim.SGD):
    """An optimizer of the user's."""


class UpdatesItself(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(optimizer_closure)

    def configure_optimizers(self) -> Any:
        return Scaled(self.net.parameters(), lr=0.1)


class Watches(L.Callback):
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pass


class ChangesAtStart(Net):
    """Lowers the rate, shrinks the weights, counts in a buffer, and forgets moments at the start of each epoch."""

    epochs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("epochs", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        optimizer: Any = self.optimizers()
        self.epochs = self.epochs + 1
        optimizer.state.clear()
        for weight in self.parameters():
            weight.data.mul_(0.5)
        groups = [{**group, "lr": 0.5 * group["lr"]} for group in optimizer.param_groups]
        optimizer.optimizer.param_groups = groups  # as optimizer.load_state_dict replaces them

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.epochs

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class OwnMomentum(Net):
    """Gathers the gradients of the steps before, which the hook sees until they are reset."""

    def __init__(self) -> None:
        super().__init__()
        self.momentum = nn.Buffer(torch.zeros(2, 8))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        gradient: Any = self.net[2].weight.grad
        if gradient is not None:
            self.momentum.mul_(0.9).add_(gradient)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[2].weight.grad += self.momentum  # type: ignore[operator]


class LoadsMoments(Net):
    """Takes the optimizer's state of another program, which names no parameters."""

    def on_train_start(self) -> None:
        other = torch.optim.SGD([torch.ones(2), torch.ones(3)], lr=0.2, momentum=0.9)
        other.param_groups[0]["params"] = list(self.net.parameters())
        self.trainer.optimizers[0].load_state_dict(other.state_dict())


class UsesNAdam(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam(self.net.parameters(), lr=0.01)


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, as that of timm, which does not call the constructor of its base class either."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        for weight in self.param_groups[0]["params"]:
            slow = self.base.state[weight].setdefault("slow", weight.detach().clone())
            weight.data = slow.lerp_(weight.detach(), 0.5).clone()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class HasOwnFormat(Lookahead):
    """As that of pytorch_optimizer."""

    def state_dict(self) -> dict[str, Any]:
        return {"base_optimizer": self.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["base_optimizer"])


class UsesOwnFormat(Net):
    def configure_optimizers(self) -> Any:
        return HasOwnFormat(torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9))


class UsesLookahead(Net):
    order = 1  # of the weights, which other hardware may reverse

    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.SGD([*self.net.parameters()][:: self.order], lr=0.1, momentum=0.9))


class RatesOfLayers(Net):
    def configure_optimizers(self) -> Any:
        layers = {name: weight for name, weight in self.net.named_parameters() if weight.ndim == 2}
        return torch.optim.SGD([{"params": weight, "lr": 0.1 * 0.5 ** int(name[0])} for name, weight in layers.items()])


class HeadByPosition(Net):
    """A body and a head, which the order of the weights divides."""

    def configure_optimizers(self) -> Any:
        *body, weight, bias = self.parameters()
        groups: list[dict[str, Any]] = [{"params": body, "lr": 0.02}, {"params": [weight, bias]}]
        return torch.optim.Adagrad(groups, 0.5)


class NoOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


class LatePlateau(Net):
    """A schedule that begins after two epochs, as after a warm-up."""

    def __init__(self, frequency: int = 1) -> None:
        super().__init__()
        self.frequency = frequency

    def on_train_epoch_end(self) -> None:
        self.log("bad", 1.0)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.current_epoch >= 2:
            scheduler.step(metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
        config = {"scheduler": schedule, "monitor": "bad", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Decays(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Rates(L.Callback):
    """Keeps the rate of each step; fails before the step `dies_at`."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.rates: list[float] = []
        self.dies_at = dies_at

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.dies_at:
            raise KeyError("killed")
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(folder: Path, module: L.LightningModule, ckpt_path: str | None = None, **options: Any) -> Any:
    given: dict[str, Any] = {"accelerator": "cpu", "devices": int(os.environ.get("WORLD_SIZE", 1)), "max_epochs": 2}
    given |= {"enable_progress_bar": False, "enable_model_summary": False, "seed": 0, "precision": "64-true"}
    if options.get("strategy") == "zero":
        options["strategy"] = onecurve.DDP(shard_optimizer=True)
    trainer = onecurve.Trainer(default_root_dir=folder, **given | options)
    trainer.fit(module, DataLoader(RandomDataset(32, 32), batch_size=8), ckpt_path=ckpt_path)
    return trainer


def fit_kind(folder: Path, kind: type[Net], strategy: str) -> dict[str, list[Any]]:
    """Fit a module that each rank makes; return its weights, of which ranks share no memory."""
    torch.manual_seed(0)
    fit(folder, kind(), strategy=strategy)
    saved = torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"]
    return {name: weight.tolist() for name, weight in saved.items()}


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (ClipsByNumber, "fsdp"),
        (Grows, "ddp"),
        (ChangesAtStart, "zero"),
        (RatesOfLayers, "pipeline"),
        (HeadByPosition, "pipeline"),
        pytest.param(ClampsIfLarge, "fsdp", marks=pytest.mark.slow),
        pytest.param(ClipsByNumber, "ddp", marks=pytest.mark.slow),
    ],
)
def test_agrees_with_one_process(kind: type[Net], strategy: str, pool: Pool, folder: Path) -> None:
    expected = fit_kind(folder / "one", kind, "auto")
    for weights in pool.run(2, fit_kind, folder / "two", kind, strategy):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert torch.allclose(torch.tensor(weight), torch.tensor(expected[name]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Grows, "the optimizer has got others: add them in `configure_model`, or use strategy=ddp"),
        (UsesMuon, "Muon of torch computes with whole matrices, of which a rank has a shard"),
        (MakesTensorOfNorms, "a hook makes a tensor of numbers that are spread over the ranks"),
    ],
)
def test_refused_on_shards(kind: type[Net], message: str, pool: Pool, folder: Path) -> None:
    with pytest.raises(RankFailed, match=f"UserError: strategy=fsdp.* {message}"):
        pool.run(2, fit_kind, folder, kind, "fsdp")


def test_hooks_of_accumulated_gradients_are_refused_where_a_step_is_divided(folder: Path) -> None:
    fit(folder / "undivided", ClampsLate(), max_epochs=1)
    fit(folder / "exact", ClampsLate(), max_epochs=1, bit_exact=True)
    with pytest.raises(UserError, match=r"net\.0\.weight has a hook of register_post_accumulate_grad_hook"):
        fit(folder / "divided", ClampsLate(), accumulate_grad_batches=2)


def test_a_pipeline_names_what_may_use_a_norm_of_all_weights(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("onecurve").addHandler(caplog.handler)
    strategy = onecurve.Pipeline(microbatches=2)
    try:
        fit(folder, UpdatesItself(), strategy=strategy, max_epochs=1, callbacks=[Watches()])
    finally:
        logging.getLogger("onecurve").removeHandler(caplog.handler)
    for name in ("UpdatesItself.optimizer_step", "Scaled.step", "Watches.on_after_backward"):
        assert f"strategy=pipeline: {name} sees the gradients of the stages of its own rank" in caplog.text


def fit_twice(folder: Path, kind: type[Net]) -> None:
    trainer = fit(folder, kind(), strategy="pipeline")
    trainer.fit(trainer.lightning_module, DataLoader(RandomDataset(32, 32), batch_size=8), ckpt_path="last")


def test_groups_of_a_divided_network_are_refused(pool: Pool, folder: Path) -> None:
    pool.run(2, fit_twice, folder / "one_group", Net)
    with pytest.raises(RankFailed, match=r"UserError: strategy=pipeline: .* fit with a new Trainer"):
        pool.run(2, fit_twice, folder / "two", HeadByPosition)


def test_a_hook_may_load_the_state_of_an_optimizer(folder: Path) -> None:
    assert fit(folder, LoadsMoments()).optimizers[0].param_groups[0]["lr"] == 0.2


def test_a_module_without_an_optimizer(folder: Path) -> None:
    assert fit(folder, NoOptimizer()).current_epoch == 2


@pytest.mark.parametrize("frequency", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_plateau_that_begins_late_has_the_rates_of_lightning(frequency: int, folder: Path) -> None:
    plain = Rates()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=10, logger=False, enable_checkpointing=False, callbacks=[plain]
    )
    trainer.fit(LatePlateau(frequency), DataLoader(RandomDataset(32, 32), batch_size=8))
    assert len({*plain.rates}) > 3 - frequency
    whole = Rates()
    fit(folder / "whole", LatePlateau(frequency), max_epochs=10, callbacks=[whole])
    assert whole.rates == plain.rates
    for step in (8, 16, 18, 20):  # at the start of an epoch and within one
        first, second = Rates(dies_at=step), Rates()
        with pytest.raises(KeyError, match="killed"):
            fit(folder / f"{step}", LatePlateau(frequency), max_epochs=10, callbacks=[first])
        resumed = fit(folder / f"{step}", LatePlateau(frequency), "last", max_epochs=10, callbacks=[second])
        assert second.rates == plain.rates[resumed.global_step - len(second.rates) :]


def test_a_plateau_is_not_behind_in_a_save_after_the_run(folder: Path) -> None:
    whole, resumed = Rates(), Rates()
    fit(folder / "whole", LatePlateau(), max_epochs=9, callbacks=[whole])
    first = fit(folder / "first", LatePlateau(), max_epochs=5)
    first.save_checkpoint(folder / "hand.ckpt")
    fit(folder / "next", LatePlateau(), str(folder / "hand.ckpt"), max_epochs=9, callbacks=[resumed])
    assert resumed.rates == whole.rates[20:]
    assert len({*whole.rates}) > 2


def stop_and_go_on(folder: Path, strategy: str) -> list[str]:
    """Return the names of weights and buffers that differ from those of a run that was not stopped."""
    torch.manual_seed(0)
    fit(folder / "whole", ChangesAtStart(), max_epochs=3, strategy=strategy)
    for step in (6, 8):  # within an epoch and at its start
        torch.manual_seed(0)
        last = LastCheckpoint(str(folder / f"{step}" / "checkpoints"), every_n_train_steps=2)
        with pytest.raises(KeyError, match="killed"):
            fit(folder / f"{step}", ChangesAtStart(), max_epochs=3, strategy=strategy, callbacks=[last, Rates(step)])
        fit(folder / f"{step}", ChangesAtStart(), "last", max_epochs=3, strategy=strategy)
    whole, *others = (
        torch.load(folder / name / "checkpoints" / "last.ckpt")["state_dict"] for name in ("whole", "6", "8")
    )
    return [name for other in others for name in whole if not torch.equal(whole[name], other[name])]


def test_hooks_of_a_start_change_nothing_again_in_an_epoch_that_goes_on(folder: Path) -> None:
    assert stop_and_go_on(folder, "auto") == []


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero", marks=pytest.mark.slow)])
def test_hooks_of_a_start_change_nothing_again_on_shards(strategy: str, pool: Pool, folder: Path) -> None:
    assert pool.run(2, stop_and_go_on, folder, strategy) == [[], []]


def fit_in_two_parts(folder: Path) -> list[Any]:
    torch.manual_seed(0)
    module = OwnMomentum()
    fit(folder, module, strategy="ddp", accumulate_grad_batches=2)
    return module.momentum.tolist()


def test_a_hook_before_the_reset_sees_the_gradients_of_the_last_step(pool: Pool, folder: Path) -> None:
    found = []
    divided: dict[str, dict[str, Any]] = {"parts": {"accumulate_grad_batches": 2}, "exact": {"bit_exact": True}}
    for name, options in {"one": {}, **divided}.items():
        torch.manual_seed(0)
        module = OwnMomentum()
        fit(folder / name, module, **options)
        found.append(module.momentum.tolist())
    found += pool.run(2, fit_in_two_parts, folder / "ranks")
    assert torch.tensor(found[0]).count_nonzero()
    for other in found[1:]:
        assert torch.allclose(torch.tensor(other), torch.tensor(found[0]), rtol=1e-9, atol=1e-12)


def test_scalars_of_an_optimizer_keep_their_type(folder: Path) -> None:
    """The product of momenta is float32, also beside weights in float64."""
    module = UsesNAdam()
    fit(folder / "whole", copy.deepcopy(module), bit_exact=True)
    with pytest.raises(KeyError, match="killed"):
        fit(folder / "two", copy.deepcopy(module), bit_exact=True, callbacks=[Rates(dies_at=4)])
    fit(folder / "two", module, "last", bit_exact=True)
    whole, two = (torch.load(folder / name / "checkpoints" / "last.ckpt")["state_dict"] for name in ("whole", "two"))
    for name, weight in whole.items():
        assert torch.equal(weight, two[name])


def test_an_optimizer_may_have_a_state_dict_of_its_own(folder: Path) -> None:
    module = UsesOwnFormat()
    fit(folder / "whole", copy.deepcopy(module))
    fit(folder / "two", copy.deepcopy(module), max_epochs=1)
    fit(folder / "two", module, "last")
    whole, two = (torch.load(folder / name / "checkpoints" / "last.ckpt")["state_dict"] for name in ("whole", "two"))
    assert all(torch.equal(weight, two[name]) for name, weight in whole.items())


def test_an_optimizer_that_wraps_another_goes_on_in_another_order(folder: Path) -> None:
    module = UsesLookahead()
    fit(folder / "whole", copy.deepcopy(module))
    with pytest.raises(KeyError, match="killed"):
        fit(folder / "two", copy.deepcopy(module), callbacks=[Rates(dies_at=4)])
    module.order = -1
    fit(folder / "two", module, "last")
    whole, two = (torch.load(folder / name / "checkpoints" / "last.ckpt")["state_dict"] for name in ("whole", "two"))
    assert all(torch.equal(weight, two[name]) for name, weight in whole.items())


class DiesAtStart(L.Callback):
    """Saves and raises before the first step of an epoch, as a signal does that came at the end of the one before."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt")
            raise KeyError("killed")


@pytest.mark.parametrize("dies", [Rates(dies_at=4), DiesAtStart()])
def test_a_resumed_run_logs_the_rate_of_an_epoch_at_its_step(dies: L.Callback, folder: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "log_every_n_steps": 1}
    fit(folder / "whole", Decays(), callbacks=[LearningRateMonitor("epoch")], **options)
    with pytest.raises(KeyError, match="killed"):
        fit(folder / "two", Decays(), callbacks=[LearningRateMonitor("epoch"), dies], **options)
    fit(folder / "two", Decays(), "last", callbacks=[LearningRateMonitor("epoch")], **options)
    rows = [(folder / name / "metrics.csv").read_text().splitlines() for name in ("whole", "two")]
    assert rows[0] == rows[1]
