"""Dropout that does not depend on the hardware: a hash of (seed, epoch, sample, layer, element) decides each element.

torch's dropout uses a random generator, whose numbers depend on the rank, the micro-batch and the pipeline stage. The
hash function follows C. Wellons, "Prospecting for hash functions" (https://nullprogram.com/blog/2018/07/31/), in
two's-complement 32-bit arithmetic. docs/benchmarks/dropout.md has its speed.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from src.engine.determinism.recomputation import remember
from src.engine.utils.compilation import device_constant

_ODD_MULTIPLIER = 0x2545F4914F6CDD1D
# int32 holds the constants 0x9E3779B9 and 0x846CA68B as negative numbers.
_GOLDEN, _MIX1, _MIX2 = -0x61C88647, 0x7FEB352D, -0x7B935975


class SampleDropout(nn.Dropout):
    """`nn.Dropout` whose mask is a hash of the samples' keys; without a key for each row it is torch's function.

    Attributes:
        keys: (n,) int64, one for each sample of the batch, or None.
        sample_hash: (n,) int32 hash of the keys and the layer.
        salt: hash of the layer's name, so that the layers of a network have different masks.
    """

    keys: Tensor | None = None
    sample_hash: Tensor | None = None
    salt: int = 0

    def forward(self, input: Tensor) -> Tensor:
        if not self._uses_keys(input):
            return super().forward(input)
        sample_hash = remember(lambda: self.sample_hash)
        assert sample_hash is not None
        return input * _keep_mask(sample_hash, input, self.p) / (1 - self.p)

    def _uses_keys(self, input: Tensor) -> bool:
        return self.keys is not None and self.training and 0 < self.p < 1 and len(input) == len(self.keys)


class DropPath(SampleDropout):
    """Drops the residual branch of a random subset of the samples: stochastic depth.

    Huang et al., "Deep networks with stochastic depth" (2016).

    Attributes:
        factor: (n,) float32 in every precision, zero for the samples that are dropped and 1 / (1 - p) for the others.
    """

    factor: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        shape = (len(input), *[1] * (input.ndim - 1))
        if not self._uses_keys(input):
            return input * super().forward(input.new_ones(shape))
        factor = remember(lambda: self.factor)
        assert factor is not None
        return input * factor.to(input.dtype).view(shape)


def drop_elements(keys: Tensor, salt: int, input: Tensor, p: float, inplace: bool = False) -> Tensor:
    """Drop elements of an (n, ...) input with probability p < 1; (n,) keys and the number of the call decide which."""
    sample_hash = (((keys ^ salt) * _ODD_MULTIPLIER) >> 32).int()
    mask = _keep_mask(sample_hash, input, p)
    return input.mul_(mask).div_(1 - p) if inplace else input * mask / (1 - p)


def _keep_mask(sample_hash: Tensor, input: Tensor, p: float) -> Tensor:
    """Return the bool mask of the elements of an (n, ...) input to keep, from (n,) hashes."""
    element_hash = _element_hash(input[0].numel(), sample_hash.device)
    return (_mix(sample_hash[:, None] ^ element_hash) >= _threshold(p)).view(input.shape)


def _mix(bits: Tensor) -> Tensor:
    """Hash int32 bits, in place."""
    bits *= _MIX1
    bits ^= bits >> 15
    bits *= _MIX2
    return bits


def _threshold(rate: float) -> int:
    """Return the least int32 hash of the elements to keep."""
    return int((rate - 0.5) * 2**32)


@device_constant
def _element_hash(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device) * _GOLDEN


@device_constant
def _column(values: tuple[int | float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def use_sample_dropout(net: nn.Module) -> None:
    """Replace the `nn.Dropout` layers of a network with `SampleDropout`, in place; the salt is a hash of the name."""
    for name, part in list(net.named_modules(remove_duplicate=False)):
        if type(part) is nn.Dropout:
            part = SampleDropout(part.p, part.inplace)
            net.set_submodule(name, part)
        if isinstance(part, SampleDropout):
            part.salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def dropouts(net: nn.Module) -> list[SampleDropout]:
    """Return the layers of a network that take keys and have a probability above zero."""
    return [part for part in net.modules() if isinstance(part, SampleDropout) and part.p > 0]


def set_keys(layers: Sequence[SampleDropout], keys: Tensor) -> None:
    """Set the (n,) int64 keys of the samples in the next forward pass.

    What layers compute from the keys alone is computed for all of them at once: a GPU is busy with the launches.
    """
    paths = [layer for layer in layers if isinstance(layer, DropPath)]
    layers = [*paths, *(layer for layer in layers if not isinstance(layer, DropPath))]
    salts = _column(tuple(layer.salt for layer in layers), torch.int64, keys.device)
    hashes = (((keys ^ salts) * _ODD_MULTIPLIER) >> 32).int()
    for layer, sample_hash in zip(layers, hashes, strict=True):
        layer.keys, layer.sample_hash = keys, sample_hash
    if paths:
        rates = tuple(path.p for path in paths)
        kept = _mix(hashes[: len(paths)].clone()) >= _column(tuple(map(_threshold, rates)), torch.int64, keys.device)
        factors = kept / _column(tuple(1 - rate for rate in rates), torch.float32, keys.device)
        for path, factor in zip(paths, factors, strict=True):
            path.factor = factor
