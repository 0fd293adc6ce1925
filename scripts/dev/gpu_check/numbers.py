"""Numbers that must not depend on the device: hashes, crops, losses and batch statistics."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scripts.dev.gpu_check.case import Session, expect
from scripts.dev.gpu_check.training import SHORT_PARITY, expect_equal, run
from src.data.augment.pixels import alternating_flip, crop_and_flip, cutout, sample_keys
from src.data.augment.trivial_augment import trivial_augment
from src.data.hashing import integers, normal, uniform
from src.data.layout import BatchLayout, DataParallelInfo
from src.strategies.batch_norm import apply_norm_groups, rank_groups

_SHAPE = (64, 32, 8, 8)  # of the inputs of batch normalization
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # norms of differences, relative


def device_of(session: Session, index: int = 0) -> torch.device:
    return torch.device("cuda", index) if session.on_gpu else torch.device("cpu")


def hashes(session: Session) -> str:
    """Compare random numbers and augmentation with those of the CPU, bit by bit."""
    device = device_of(session)
    index = torch.arange(4096)
    image = torch.randint(256, (4096, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    exact = {name: (make(index, image), make(index.to(device), image.to(device)).cpu()) for name, make in _EXACT}
    for name, (expected, found) in exact.items():
        expect(torch.equal(expected, found), f"{name} differ from the CPU's in {_unequal(expected, found):.2%}")
    keys = sample_keys(1, 2, index)
    warped = _unequal(trivial_augment(image, keys), trivial_augment(image.to(device), keys.to(device)).cpu())
    normals = float((normal(keys, 8) - normal(keys.to(device), 8).cpu()).abs().max())
    return f"{', '.join(exact)} equal; TrivialAugment: {warped:.2%} of pixels differ; normals differ by {normals:.0e}"


_EXACT: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
    ("hashes", lambda index, image: sample_keys(1, 2, index)),
    ("uniforms", lambda index, image: uniform(sample_keys(1, 2, index), 3)),
    ("integers", lambda index, image: integers(sample_keys(1, 2, index), (3, 4), (9, 32))),
    ("crops", lambda index, image: crop_and_flip(image, sample_keys(1, 2, index), 4, True)),
    ("flips", lambda index, image: crop_and_flip(image, index, 0, alternating_flip(sample_keys(1, 0, index), 3))),
    ("cutout", lambda index, image: cutout(image.float(), sample_keys(1, 2, index), 8)),
]


def _unequal(a: Tensor, b: Tensor) -> float:
    return float((a != b).float().mean())


def cpu_parity(session: Session) -> str:
    """Compare eight float64 steps of the default model with those of the CPU."""
    expected = run(replace(session, accelerator="cpu"), "cpu", *SHORT_PARITY)
    return f"difference {expect_equal(run(session, 'device', *SHORT_PARITY), expected)}"


def sync_batch_norm(session: Session) -> str:
    """Compare two processes with batch normalization of their global batch in float64; on one GPU, over gloo."""
    backend = "nccl" if session.on_gpu and session.devices > 1 else "gloo"
    torch.multiprocessing.spawn(_normalize_on_rank, (session, backend), nprocs=2)
    figures = []
    for dtype, tolerance in _TOLERANCES.items():
        expected, ranks = _reference(dtype), [torch.load(_file(session, rank, dtype)) for rank in range(2)]
        for name, found in _of_global_batch(ranks):
            error = float((found - expected[name]).norm() / expected[name].norm())
            expect(error <= tolerance, f"{name} in {dtype} differs by {error:.0e}, at most {tolerance:.0e} expected")
            figures.append((dtype, error))
    worst = {dtype: max(error for other, error in figures if other is dtype) for dtype in _TOLERANCES}
    return f"over {backend}: {worst[torch.float32]:.0e} in float32, {worst[torch.bfloat16]:.0e} in bfloat16"


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weights = (shift + torch.randn(_SHAPE, generator=generator) for shift in (3, 0))
    return x.to(dtype), weights.to(dtype)


def _step(norm: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return output, gradients and running statistics of one step, in float64 on the CPU."""
    x = x.detach().requires_grad_()
    y = norm(x)
    (y * weights).sum().backward()
    gradients = {f"gradient of {name}": value.grad for name, value in norm.named_parameters()}
    running = {name: value for name, value in norm.named_buffers() if value.ndim}
    found: dict[str, Any] = {"output": y, "gradient of the input": x.grad} | gradients | running
    return {name: value.detach().double().cpu() for name, value in found.items()}


def _reference(dtype: torch.dtype) -> dict[str, Tensor]:
    return _step(nn.BatchNorm2d(_SHAPE[1]).double(), *(values.double() for values in _inputs(dtype)))


def _file(session: Session, rank: int, dtype: torch.dtype) -> Any:
    return session.folder / f"{rank} {dtype}.pt"


def _normalize_on_rank(rank: int, session: Session, backend: str) -> None:
    device = device_of(session, rank if backend == "nccl" else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{session.folder}/rendezvous", rank=rank, world_size=2)
    for dtype in _TOLERANCES:
        net = nn.Sequential(nn.BatchNorm2d(_SHAPE[1]).to(device))
        apply_norm_groups(net, rank_groups(BatchLayout(_SHAPE[0], DataParallelInfo(2, rank)), dist.group.WORLD))
        part = [values[rank::2].to(device) for values in _inputs(dtype)]
        torch.save(_step(net[0], *part), _file(session, rank, dtype))
    dist.destroy_process_group()


def _of_global_batch(ranks: list[dict[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each result of the global batch: rows of both ranks, sums of gradients, statistics that ranks share."""
    for name in ranks[0]:
        one, two = (rank[name] for rank in ranks)
        if name in ("output", "gradient of the input"):
            yield name, torch.stack([one, two], dim=1).flatten(0, 1)
        else:
            yield name, one + two if name.startswith("gradient") else one
