"""Random numbers and augmentation that must not depend on the device."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.dev.gpu_check.case import Session, expect
from onecurve.random.hashing import integers, normal, uniform
from src.data.augment.pixels import alternating_flip, crop_and_flip, cutout, sample_keys

_EXACT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hashes": lambda index, image: sample_keys(1, 2, index),
    "uniforms": lambda index, image: uniform(sample_keys(1, 2, index), 3),
    "integers": lambda index, image: integers(sample_keys(1, 2, index), (3, 4), (9, 32)),
    "crops": lambda index, image: crop_and_flip(image, sample_keys(1, 2, index), 4, True),
    "flips": lambda index, image: crop_and_flip(image, index, 0, alternating_flip(sample_keys(1, 0, index), 3)),
    "cutout": lambda index, image: cutout(image.float(), sample_keys(1, 2, index), 8),
}


def hashes(session: Session) -> str:
    """Compare random numbers and augmentation with those of the CPU, bit by bit."""
    device = torch.device("cuda" if session.on_gpu else "cpu")
    index = torch.arange(4096)
    image = torch.randint(256, (4096, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for name, make in _EXACT.items():
        wrong = _unequal(make(index, image), make(index.to(device), image.to(device)).cpu())
        expect(wrong == 0, f"{name} differ from the CPU's in {wrong:.2%}")
    keys = sample_keys(1, 2, index)
    normals = float((normal(keys, 8) - normal(keys.to(device), 8).cpu()).abs().max())
    return f"{', '.join(_EXACT)} equal; normals differ by {normals:.0e}"


def _unequal(a: Tensor, b: Tensor) -> float:
    return float((a != b).float().mean())
