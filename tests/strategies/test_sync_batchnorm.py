"""Batch normalization over all ranks equals that of one process on the full batch, with gradients and buffers."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from src.run.experiment import assemble
from src.strategies.sync_batchnorm import GlobalBatchNorm, SyncedBatchNorm
from tests.support.pool import Pool
from tests.support.runs import compose

SHAPES = {"1d": (8, 5), "1d long": (8, 5, 3), "2d": (8, 5, 4, 4)}


def layer(shape: tuple[int, ...], **options: object) -> nn.Module:
    torch.manual_seed(0)
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    norm = kind(5, dtype=torch.float64, **options)  # type: ignore[arg-type]
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


def step(norm: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    for _ in range(2):
        y = norm(x)
    (y * weights).sum().backward()
    assert x.grad is not None
    parameters = {f"grad of {name}": parameter.grad for name, parameter in norm.named_parameters()}
    return {"y": y.detach(), "x": x.grad} | {name: grad for name, grad in parameters.items() if grad is not None}


def step_on_rank(shape: tuple[int, ...], options: dict[str, object], x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    norm = GlobalBatchNorm().apply(nn.Sequential(layer(shape, **options)))
    result = step(norm[0], x[rank::world], weights[rank::world])  # type: ignore[index]
    return result | dict(norm[0].named_buffers())  # type: ignore[index]


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_agrees_with_single_process(shape: tuple[int, ...], options: dict[str, object], pool: Pool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = 3 + torch.randn(shape, dtype=torch.float64, generator=generator)
    weights = torch.randn(shape, dtype=torch.float64, generator=generator)
    norm = layer(shape, **options)
    alone = step(norm, x, weights) | dict(norm.named_buffers())
    ranks = pool.run(2, step_on_rank, shape, options, x, weights)
    for name, expected in alone.items():
        parts = [rank[name] for rank in ranks]
        if name in ("y", "x"):
            got = torch.empty_like(expected)
            got[0::2], got[1::2] = parts
        else:
            got = sum(parts) if name.startswith("grad") else parts[1]
        assert torch.allclose(got, expected.to(got.dtype), rtol=1e-11, atol=1e-11), name


def test_apply_and_revert_keep_parameters_and_names() -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5))
    before = dict(net.named_parameters())
    applied = GlobalBatchNorm().apply(net)
    assert isinstance(applied[1], SyncedBatchNorm)  # type: ignore[index]
    reverted = GlobalBatchNorm().revert(applied)
    assert type(reverted[1]) is nn.BatchNorm2d  # type: ignore[index]
    assert all(before[name] is parameter for name, parameter in reverted.named_parameters())


@pytest.mark.parametrize("on", [True, False])
def test_can_be_switched_off(on: bool, small: list[str], folder: Path) -> None:
    trainer, _, _ = assemble(compose(folder, *small, "strategy=ddp", f"trainer.sync_batchnorm={on}"))
    assert isinstance(trainer.strategy._layer_sync, GlobalBatchNorm) is on
