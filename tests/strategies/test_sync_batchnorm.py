"""Batch normalization over all ranks equals that of one process on the full batch, with gradients and buffers."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from src.strategies.sync_batchnorm import GlobalBatchNorm, SyncedBatchNorm
from torch import Tensor, nn

from src.run.experiment import assemble
from tests.support import batch_norm_kernels
from tests.support.pool import Pool
from tests.support.runs import compose

SHAPES = {"1d": (8, 5), "1d long": (8, 5, 3), "2d": (8, 5, 4, 4), "3d": (8, 5, 2, 3, 2)}
OPTIONS: list[dict[str, Any]] = [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}]
KINDS = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]


def layer(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    norm = KINDS[len(shape) - 2](5, dtype=dtype, **options)
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


def step_on_rank(
    shape: tuple[int, ...], options: dict[str, Any], x: Tensor, weights: Tensor, kernels: str, compiled: bool = False
) -> dict[str, Tensor]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    norm: Any = GlobalBatchNorm().apply(nn.Sequential(layer(shape, **options)))[0]  # type: ignore[index]
    batch_norm_kernels.register()
    with mock.patch.object(SyncedBatchNorm, "_forward_on_cpu", getattr(SyncedBatchNorm, f"_forward_on_{kernels}")):
        if compiled:
            torch._dynamo.reset()
            norm.forward = torch.compile(norm.forward, backend="aot_eager", fullgraph=True)
        result = step(norm, x[rank::world], weights[rank::world])
        norm.eval()
        assert norm(x[rank::world]).shape == x[rank::world].shape
    return result | dict(norm.named_buffers())


def inputs(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [shift + torch.randn(shape, dtype=torch.float64, generator=generator) for shift in (3, 0)]


def check(ranks: list[dict[str, Tensor]], alone: dict[str, Tensor], rtol: float, atol: float) -> None:
    """Check that the ranks computed what a single process does."""
    for name, expected in alone.items():
        parts = [rank[name] for rank in ranks]
        if name in ("y", "x"):
            got: Any = torch.empty_like(parts[0].repeat(2, *[1] * (expected.ndim - 1)))
            got[0::2], got[1::2] = parts
        else:
            got = sum(parts) if name.startswith("grad") else parts[1]
        assert torch.allclose(got.to(expected.dtype), expected, rtol, atol), name


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_agrees_with_single_process(shape: tuple[int, ...], options: dict[str, Any], kernels: str, pool: Pool) -> None:
    norm = layer(shape, **options)
    alone = step(norm, *inputs(shape)) | dict(norm.named_buffers())
    ranks = pool.run(2, step_on_rank, shape, options, *inputs(shape), kernels)
    check(ranks, alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"momentum": None}], ids=str)
def test_compiles_as_one_graph(options: dict[str, Any], pool: Pool) -> None:
    norm = layer(SHAPES["2d"], **options)
    alone = step(norm, *inputs(SHAPES["2d"])) | dict(norm.named_buffers())
    ranks = pool.run(2, step_on_rank, SHAPES["2d"], options, *inputs(SHAPES["2d"]), "cuda", True)
    check(ranks, alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("stats_type", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_kernels_in_half_precision(stats_type: torch.dtype, pool: Pool) -> None:
    """The input has type bfloat16 and channels last; the layer has the same type, or float32 as under autocast."""
    shape = SHAPES["2d"]
    x, weights = (values.to(torch.bfloat16, memory_format=torch.channels_last) for values in inputs(shape))
    norm = layer(shape).float()
    alone = step(norm, x.float(), weights.float()) | dict(norm.named_buffers())
    ranks = pool.run(2, step_on_rank, shape, {"dtype": stats_type}, x, weights, "cuda")
    assert ranks[0]["y"].dtype == ranks[0]["x"].dtype == torch.bfloat16
    assert ranks[0]["running_var"].dtype == ranks[0]["grad of weight"].dtype == stats_type
    assert ranks[0]["y"].is_contiguous(memory_format=torch.channels_last)
    check(ranks, alone, rtol=0.02, atol=0.05)


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
