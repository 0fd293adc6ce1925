"""Batch normalization over groups is the same for any ranks and micro-batches, with gradients and buffers."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import onecurve
from onecurve.data.layout import BatchLayout, DataParallelInfo
from onecurve.errors import UserError
from onecurve.parallel.batch_norm import (
    apply_norm_groups,
    average_statistics,
    rank_groups,
    revert_norm_groups,
)
from onecurve.run.experiment import assemble
from tests.support.comparison import TOLERANCE, relative
from tests.support.experiments import SHORT_RUN
from tests.support.layers import BatchNormAct2d
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit


class BatchNormAct(nn.BatchNorm2d):
    """An activation after torch's forward pass."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input), inplace=True)


SHAPES = {"1d": (12, 5), "1d long": (12, 5, 3), "2d": (12, 5, 4, 4), "3d": (12, 5, 2, 3, 2)}
OPTIONS: list[dict[str, Any]] = [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}]
KINDS = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
Layout = dict[str, Any]
WORLDS: dict[str, tuple[int, Layout]] = {  # ranks, and what else is laid out
    "pairs of ranks share": (4, {"virtual_ranks": 2}),
    "all ranks share": (3, {"virtual_ranks": 4}),
    "uneven groups": (2, {"virtual_ranks": 5}),
    "shares that divide groups": (3, {"virtual_ranks": 2, "shares": (3, 2, 1)}),
    "micro-batches on ranks": (2, {"virtual_ranks": 4, "accumulate": 2}),
    "micro-batches that ranks share": (2, {"virtual_ranks": 4, "accumulate": 4}),
}


@pytest.mark.parametrize(("virtual_ranks", "groups"), [(5, [[0, 1], [0, 1], [2], [3]]), (4, [])], ids=["some", "none"])
def test_all_ranks_divide_their_group_or_none(
    virtual_ranks: int, groups: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL divides the group of all ranks in a collective, so that a rank which shares nothing must call it as well."""
    made: list[list[int]] = []

    def new_group(ranks: list[int], **_: Any) -> list[int]:
        made.append(ranks)
        return ranks

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    monkeypatch.setattr(dist, "new_group", new_group)
    layouts = [BatchLayout(6, DataParallelInfo(4, rank), virtual_ranks=virtual_ranks) for rank in range(4)]
    sharing = [rank_groups(layout, "all").sharing for layout in layouts]
    assert made == groups
    assert sharing == [group if len(group) > 1 else None for group in groups or [[]] * 4]


def layer(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    norm = options.pop("kind", KINDS[len(shape) - 2])(5, dtype=dtype, **options)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    one, two = (shift + torch.randn(shape, dtype=torch.float64, generator=generator) for shift in (3, 0))
    return one.to(dtype), two.to(dtype)


def reference(norm: Any, x: Tensor, weights: Tensor, groups: int, steps: int = 2) -> dict[str, Tensor]:
    """Normalize each group by torch's layer; the running statistics are the mean over the groups."""
    x = x.clone().requires_grad_()
    parameters, buffers = dict(norm.named_parameters()), dict(norm.named_buffers())
    for _ in range(steps):
        y, own = torch.zeros_like(x), []
        for group in range(groups):
            own.append({name: value.clone() for name, value in buffers.items()})
            rows = torch.arange(group, len(x), groups)
            y = y.index_put((rows,), functional_call(norm, parameters | own[-1], x[rows]))
        buffers = {name: torch.stack([part[name].double() for part in own]).mean(0) for name in buffers}
        buffers = {name: value.to(own[0][name].dtype) for name, value in buffers.items()}
    (y * weights).sum().backward()
    assert x.grad is not None
    gradients = {f"grad of {name}": parameter.grad for name, parameter in parameters.items()}
    return {"y": y.detach(), "x": x.grad} | buffers | gradients


def step_on_rank(
    shape: tuple[int, ...], options: dict[str, Any], layout_options: Layout, compiled: bool = False, steps: int = 2
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this rank's positions, and the results of the layer for them."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    size, others = dist.get_world_size(), dict(layout_options)
    shares, dtype = others.pop("shares", None), others.pop("dtype", torch.float64)
    layout = BatchLayout(len(inputs(shape)[0]), DataParallelInfo(size, dist.get_rank(), shares=shares), **others)
    net = nn.Sequential(layer(shape, **options))
    apply_norm_groups(net, rank_groups(layout, dist.group.WORLD if size > 1 else None))
    norm: Any = net[0]
    if compiled:
        torch._dynamo.reset()
        norm.forward = torch.compile(norm.forward, backend="aot_eager", fullgraph=True)
    x, weights = inputs(shape, dtype)
    results = []
    for _ in range(steps):
        norm.begin_step()
        outputs = []
        for rows in layout.positions:
            part = x[rows].requires_grad_()
            outputs.append((part, norm(part)))
    for (part, y), rows in zip(outputs, layout.positions, strict=True):
        (y * weights[rows]).sum().backward()
        results.append((y.detach(), part.grad))
    average_statistics(net)
    dist.barrier()  # a rank may have sent nothing, and the other still connects
    y, grad = (torch.cat(values) for values in zip(*results, strict=True))
    gradients = {f"grad of {name}": parameter.grad for name, parameter in norm.named_parameters()}
    norm.eval()
    assert norm(x).shape == x.shape
    return layout.positions.flatten(), {"y": y, "x": grad} | gradients | dict(norm.named_buffers())


def check(
    ranks: list[tuple[Tensor, dict[str, Tensor]]], expected: dict[str, Tensor], rtol: float, atol: float = 1e-11
) -> None:
    """Check that the ranks together computed what is expected."""
    order = torch.cat([positions for positions, _ in ranks])
    assert sorted(order.tolist()) == list(range(len(expected["y"])))
    for name, value in expected.items():
        parts = [results[name] for _, results in ranks]
        if name in ("y", "x"):
            found = torch.empty_like(value, dtype=parts[0].dtype).index_copy(0, order, torch.cat(parts))
        else:
            found = sum(parts[1:], start=parts[0]) if name.startswith("grad") else parts[-1]
        assert torch.allclose(found.to(value.dtype), value, rtol, atol), name


@pytest.mark.parametrize(("shape", "options"), [*zip(SHAPES.values(), OPTIONS, strict=True)], ids=SHAPES)
@pytest.mark.parametrize("groups", [1, 4])
def test_agrees_with_torch_per_group(groups: int, shape: tuple[int, ...], options: dict[str, Any], pool: Pool) -> None:
    expected = reference(layer(shape, **options), *inputs(shape), groups)
    check(pool.run(2, step_on_rank, shape, options, {"virtual_ranks": groups}), expected, 1e-11)


@pytest.mark.parametrize("world", WORLDS)
def test_any_ranks_and_micro_batches_agree(world: str, pool: Pool) -> None:
    ranks, layout = WORLDS[world]
    expected = reference(layer(SHAPES["2d"]), *inputs(SHAPES["2d"]), layout["virtual_ranks"])
    check(pool.run(ranks, step_on_rank, SHAPES["2d"], {}, layout), expected, 1e-11)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("world", "kind"),
    [
        ("pairs of ranks share", BatchNormAct),
        ("micro-batches on ranks", BatchNormAct2d),
        ("uneven groups", nn.SyncBatchNorm),
    ],
)
def test_an_own_forward_pass_is_kept(world: str, kind: Any, options: dict[str, Any], pool: Pool) -> None:
    (ranks, layout), options = WORLDS[world], options | {"kind": kind}
    expected = reference(layer(SHAPES["2d"], **options), *inputs(SHAPES["2d"]), layout["virtual_ranks"])
    check(pool.run(ranks, step_on_rank, SHAPES["2d"], options, layout), expected, 1e-11)


@pytest.mark.parametrize(
    ("groups", "options"),
    [(4, {"kind": BatchNormAct2d}), *(pytest.param(groups, {}, marks=pytest.mark.slow) for groups in (1, 4))],
    ids=str,
)
def test_compiles_as_one_graph(groups: int, options: dict[str, Any], pool: Pool) -> None:
    expected = reference(layer(SHAPES["2d"], **options), *inputs(SHAPES["2d"]), groups)
    check(pool.run(2, step_on_rank, SHAPES["2d"], options, {"virtual_ranks": groups}, True), expected, 1e-11)


@pytest.mark.parametrize(("groups", "dtype"), [(1, torch.float32), (4, torch.bfloat16)], ids=str)
def test_half_precision(groups: int, dtype: torch.dtype, pool: Pool) -> None:
    """The input is in bfloat16, and the layer as well, or in float32 as under autocast."""
    expected = reference(layer(SHAPES["2d"]), *inputs(SHAPES["2d"]), groups)
    half = {"virtual_ranks": groups, "dtype": torch.bfloat16}
    ranks = pool.run(2, step_on_rank, SHAPES["2d"], {"dtype": dtype}, half)
    assert ranks[0][1]["y"].dtype == ranks[0][1]["x"].dtype == torch.bfloat16
    assert ranks[0][1]["running_var"].dtype == ranks[0][1]["grad of weight"].dtype == dtype
    check(ranks, expected, 0.05, atol=0.4)  # the sums over 200 values are the least exact


class _BatchMoments(nn.BatchNorm1d):
    """A layer that computes the moments of the batch itself."""

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, input.mean(0), input.var(0), self.weight, self.bias)


class _Frozen(nn.BatchNorm1d):
    """A layer that normalizes by its running statistics."""

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias)


def test_refuses_a_forward_pass_that_normalizes_otherwise() -> None:
    groups = rank_groups(BatchLayout(8, virtual_ranks=2), None)
    apply_norm_groups(net := nn.Sequential(_BatchMoments(5), _Frozen(5)), groups)
    x = torch.randn(8, 5)
    assert torch.equal(copy.deepcopy(net)[1](x), _Frozen(5)(x))
    with pytest.raises(UserError, match=r"^_BatchMoments.forward does not call.*trainer.sync_batchnorm=false"):
        net(x)


def test_reverts_compiled_layers_and_refuses_a_replaced_forward() -> None:
    groups = rank_groups(BatchLayout(8, virtual_ranks=2), None)
    apply_norm_groups(net := nn.Sequential(_Frozen(5), nn.BatchNorm1d(5)), groups)
    net[1].forward = net[1].forward  # as torch.compile does
    revert_norm_groups(net)
    assert [type(norm) for norm in net] == [_Frozen, nn.BatchNorm1d]
    net(torch.randn(8, 5))
    net[1].forward = net[0].forward
    with pytest.raises(UserError, match=r"1\.forward is replaced"):
        apply_norm_groups(net, groups)


def test_refuses_rows_that_belong_to_no_group() -> None:
    net = nn.Sequential(nn.BatchNorm1d(5))
    apply_norm_groups(net, rank_groups(BatchLayout(8, virtual_ranks=2), None))
    net(torch.randn(8, 5))
    with pytest.raises(UserError, match=r"gets 16 rows for 8 samples.*virtual_ranks=1"):
        net(torch.randn(16, 5))
    apply_norm_groups(net := nn.Sequential(nn.BatchNorm1d(5)), rank_groups(BatchLayout(8), None))
    assert net(torch.randn(16, 5)).shape == (16, 5), "one group has all rows"
    assert net(torch.randn(3, 5)).shape == (3, 5), "also some of them"
    apply_norm_groups(net := nn.Sequential(nn.BatchNorm1d(5)), rank_groups(BatchLayout(8, virtual_ranks=8), None))
    with pytest.raises(UserError, match="one value per channel"):
        net(torch.randn(8, 5))


def test_network_without_batch_normalization_has_no_groups(small: list[str], folder: Path) -> None:
    fit(compose(folder, *small, *SHORT_RUN, "virtual_ranks=32", "model.norm=group", "trainer.max_steps=1"))


class _TwoPasses(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        return self.net(image) + self.net(image.flip(3))


def _fit_two_passes(cfg: Any) -> Any:
    trainer, module, data = assemble(cfg)
    module.net = _TwoPasses(module.net)  # type: ignore[arg-type]
    trainer.fit(module, datamodule=data)


def test_refuses_a_network_that_runs_twice_per_micro_batch(small: list[str], folder: Path) -> None:
    task = [*small, *SHORT_RUN, "callbacks=none", "trainer.max_steps=2"]
    _fit_two_passes(compose(folder, *task))
    with pytest.raises(UserError, match="runs more than once in a forward pass"):
        _fit_two_passes(compose(folder, *task, "trainer.accumulate_grad_batches=2"))


class _ComputedAgain(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.norm, x, use_reentrant=False)


def test_a_layer_that_a_checkpoint_computes_again_counts_once(small: list[str], folder: Path) -> None:
    task = [*small, *SHORT_RUN, "callbacks=none", "trainer.max_steps=3", "trainer.accumulate_grad_batches=2"]
    losses = []
    for wrap in (nn.Sequential, _ComputedAgain):
        trainer, module, data = assemble(compose(folder / wrap.__name__, *task))
        stem: Any = module.net.stem
        stem[1] = wrap(stem[1])
        trainer.fit(module, datamodule=data)
        losses.append(float(trainer.callback_metrics["train/loss"]))
    assert losses[1] == losses[0]


def test_evaluation_and_checkpoints_have_the_mean_over_all_groups(
    alone: Callable[..., Record], short_run: Callable[..., list[Record]], folder: Path
) -> None:
    """Each rank's own statistics would give another validation loss, and those of rank zero another checkpoint."""
    average = ["callbacks=[default,ema]", "callbacks.ema.decay=0.5"]
    for record in short_run(*average, "strategy=ddp", "trainer.devices=2"):
        for name in ("val/loss", "test/loss", "test/acc"):
            assert record.metrics[name] == pytest.approx(alone(*average).metrics[name], rel=TOLERANCE)
    for name in ("last", "best"):
        single = alone(*average).file.parent
        ours, theirs = (torch.load(run / "checkpoints" / f"{name}.ckpt") for run in (single, folder))
        for key, value in ours["state_dict"].items():
            assert relative(theirs["state_dict"][key], value) < TOLERANCE


class Estimating(L.LightningModule):
    """Has batch normalization, whose statistics are estimated anew after each epoch, from other batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EstimatingInModule(Estimating):
    def on_train_epoch_end(self) -> None:
        update_bn(own_batches(), self.net)


class EstimatingCallback(L.Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda trainer, module: update_bn(own_batches(), module.net))


def own_batches() -> list[tuple[Tensor]]:
    return [(torch.arange(4.0 * rows).view(rows, 4) ** 2,) for rows in (8, 3)]


def estimate(folder: Path, strategy: str, devices: int, hook: str) -> list[float]:
    trainer = onecurve.Trainer(
        callbacks=[EstimatingCallback(hook)] if hook else None,
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=2,
        default_root_dir=folder / strategy,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Estimating() if hook else EstimatingInModule()
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), 8)
    trainer.fit(module, loader, loader if hook == "on_validation_start" else None)
    running: Any = module.net[0].running_var
    return running.tolist()


@pytest.mark.parametrize("hook", ["", "on_train_epoch_end", "on_validation_start"])
def test_a_hook_of_the_end_of_an_epoch_estimates_as_in_torch(pool: Pool, folder: Path, hook: str) -> None:
    """Each rank has the same batches of any size, which are no parts of a step's: in the module, or in a callback."""
    expected = nn.Sequential(nn.BatchNorm1d(4))
    update_bn(own_batches(), expected)
    running: Any = expected[0].running_var
    found = [estimate(folder, "auto", 1, hook), *pool.run(2, estimate, folder, "ddp", 2, hook)]
    assert found == [pytest.approx(running.tolist(), rel=TOLERANCE)] * 3


class Repeating(Estimating):
    """Computes the batch again, in the hook of its end."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


def test_refuses_a_hook_that_normalizes_between_the_micro_batches_of_steps(folder: Path) -> None:
    """The running statistics would decay as in a step, and get a part of what a step adds."""
    trainer = onecurve.Trainer(
        accumulate_grad_batches=2,
        virtual_ranks=2,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(UserError, match="between two steps"):
        trainer.fit(Repeating(), DataLoader(TensorDataset(torch.randn(16, 4)), 8))


class Failing(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ValueError("fails")


def test_another_trainer_has_its_groups_after_an_error(folder: Path) -> None:
    module, loader = Estimating(), DataLoader(TensorDataset(torch.randn(16, 4)), 8)
    fresh = copy.deepcopy(module)

    def train(module: L.LightningModule, virtual_ranks: int, *callbacks: L.Callback) -> None:
        onecurve.Trainer(
            virtual_ranks=virtual_ranks,
            callbacks=callbacks,
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            default_root_dir=folder / f"{virtual_ranks} {id(module)}",
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, loader)

    with pytest.raises(ValueError, match="fails"):
        train(module, 2, Failing())
    module.load_state_dict(fresh.state_dict())
    for each in (module, fresh):
        train(each, 4)
    assert all(map(torch.equal, module.parameters(), fresh.parameters()))


class Averaging(L.Callback):
    """Averages a copy of the network after each step, as timm's ModelEmaV2."""

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        self.net = copy.deepcopy(module.net)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        for average, value in zip(self.net.state_dict().values(), module.net.state_dict().values(), strict=True):
            average.copy_(0.5 * average + 0.5 * value)


class Keeping(L.Callback):
    """Keeps the statistics after each epoch."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.net = copy.deepcopy(module.net)


def average(folder: Path, strategy: str, devices: int, kind: type[Any]) -> list[float]:
    options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"strategy": strategy, "devices": devices, "max_epochs": 2, "virtual_ranks": 4}
    callback = kind()
    trainer = onecurve.Trainer(callbacks=[callback], default_root_dir=folder / strategy, **options)
    trainer.fit(Estimating(), DataLoader(TensorDataset(torch.randn(32, 4)), 8))
    return callback.net[0].running_var.tolist()


def fit_with_callback_of_rank_zero(folder: Path) -> None:
    callbacks = [Averaging()] if os.environ["RANK"] == "0" else []
    options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    trainer = onecurve.Trainer(
        callbacks=callbacks, default_root_dir=folder, strategy="ddp", devices=2, max_epochs=1, **options
    )
    trainer.fit(Estimating(), DataLoader(TensorDataset(torch.randn(32, 4)), 8))


def test_a_callback_may_be_on_one_rank_alone(pool: Pool, folder: Path) -> None:
    pool.run(2, fit_with_callback_of_rank_zero, folder)


@pytest.mark.parametrize("kind", [Averaging, Keeping])
def test_a_callback_has_the_mean_over_all_groups(kind: type[Any], pool: Pool, folder: Path) -> None:
    expected, *found = average(folder, "auto", 1, kind), *pool.run(2, average, folder, "ddp", 2, kind)
    assert found == [pytest.approx(expected, rel=1e-5)] * 2


class Probing(L.Callback):
    """Runs the network on the batch of each step before it."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        module.net(batch[0])


def probe(folder: Path, strategy: str, devices: int) -> list[float]:
    options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"strategy": strategy, "devices": devices, "max_epochs": 2, "val_check_interval": 1}
    trainer = onecurve.Trainer(callbacks=[Probing()], default_root_dir=folder / strategy, **options)
    module, loader = Estimating(), DataLoader(TensorDataset(torch.randn(16, 4)), 8)
    trainer.fit(module, loader, loader)
    running: Any = module.net[0].running_var
    return running.tolist()


def test_a_callback_that_runs_the_network_before_each_step_has_the_groups_of_the_step(pool: Pool, folder: Path) -> None:
    expected, *found = probe(folder, "auto", 1), *pool.run(2, probe, folder, "ddp", 2)
    assert found == [pytest.approx(expected, rel=1e-5)] * 2


class ForbidAfterTeardown(L.Callback):
    """Lets collectives fail once the strategy has moved the module to the CPU, as NCCL does with tensors there."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        teardown = trainer.strategy.teardown

        def teardown_and_forbid() -> None:
            teardown()
            dist.all_reduce = fail

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("No backend type associated with device type cpu")

        trainer.strategy.teardown = teardown_and_forbid  # type: ignore[method-assign]


def fit_with_nothing_after_teardown(cfg: Any) -> None:
    all_reduce = dist.all_reduce
    try:
        fit(cfg, ForbidAfterTeardown())
    finally:
        dist.all_reduce = all_reduce


def test_statistics_are_averaged_before_the_module_leaves_the_device(
    pool: Pool, small: list[str], folder: Path
) -> None:
    cfg = compose(folder, *small, *SHORT_RUN, "strategy=ddp", "trainer.devices=2")
    pool.run(2, fit_with_nothing_after_teardown, cfg)
