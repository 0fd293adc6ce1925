"""Dropout that does not depend on the hardware: a hash of (seed, epoch, sample, layer, element) decides each element.

torch's dropout uses a random generator, whose numbers depend on the rank, the micro-batch and the pipeline stage. The
hash function follows C. Wellons, "Prospecting for hash functions" (https://nullprogram.com/blog/2018/07/31/), in
two's-complement 32-bit arithmetic. docs/benchmarks/dropout.md has its speed.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onecurve.network.compilation import constant
from onecurve.patches.torch import is_in_vmap
from onecurve.random.hashing import hash_elements, hash_ints

# Each call of a layer adds it to the seed of torch's CPU generator, which reads the lowest 32 bits; a function adds 1.
CALL = 0x19E3779B1
_ODD_MULTIPLIER = 0x2545F4914F6CDD1D
# int32 holds the constants 0x9E3779B9 and 0x846CA68B as negative numbers.
_GOLDEN, _MIX1, _MIX2 = -0x61C88647, 0x7FEB352D, -0x7B935975


class SampleDropout(nn.Dropout):
    """`nn.Dropout` whose mask is a hash of the samples' keys; without a key for each row it is torch's function.

    Unlike a function in place of `F.dropout`, it can be a part of a compiled network, where all its calls in a step
    have one mask. Otherwise each call has another one.

    Attributes:
        keys: (n,) int64, one for each sample of the batch, or None.
        sample_hash: (n,) int32 hash of the keys and the layer.
        salt: hash of the layer's name, so that the layers of a network have different masks.
        numbers: numbers of the calls in a step, by the seed of torch's CPU generator; None if all are the first.
    """

    keys: Tensor | None = None
    sample_hash: Tensor | None = None
    salt: int = 0
    numbers: dict[int, int] | None = None

    def forward(self, input: Tensor) -> Tensor:
        hashes = self.sample_hash
        if hashes is None or len(input) != len(hashes) or not (self.training and 0 < self.p < 1) or is_in_vmap():
            return super().forward(input)
        if number := self.begin_call():
            assert self.keys is not None
            hashes = hash_samples(self.keys, self.salt ^ int(hash_ints(number)))
        mask = keep_mask(hashes, input.shape, self.p)
        return input.mul_(mask).div_(1 - self.p) if self.inplace else input * mask / (1 - self.p)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy gets: it draws as `F.dropout`, until it has a name, and so a salt, of its own."""
        return {name: value for name, value in vars(self).items() if name not in ("keys", "sample_hash", "numbers")}

    def begin_call(self) -> int:
        """Return the number of the call in the step, and leave the generator with another seed.

        torch.utils.checkpoint restores the seed, by which a block that is computed again finds the number of its call.
        """
        if torch.compiler.is_compiling() or self.numbers is None:
            return 0
        seed = torch.initial_seed()
        torch.default_generator.manual_seed(seed + CALL)
        return self.numbers.setdefault(seed, len(self.numbers))


class DropPath(SampleDropout):
    """Drops the residual branch of a random subset of the samples: stochastic depth.

    Huang et al., "Deep networks with stochastic depth" (2016).
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        return input * super().forward(input.new_ones(len(input), *[1] * (input.ndim - 1)))


def hash_samples(keys: Tensor, salt: int | Tensor) -> Tensor:
    """Return int32 hashes of the (n,) keys of samples and of the salt of a layer or a call, or (layers, 1) salts."""
    return (((keys ^ salt) * _ODD_MULTIPLIER) >> 32).int()


def keep_mask(sample_hash: Tensor, shape: torch.Size, rate: float) -> Tensor:
    """Return the bool mask of the elements of an (n, ...) tensor to keep, from (n,) hashes."""
    elements = hash_elements(shape[1:], sample_hash.device, torch.int32, _GOLDEN, _mix)
    bits = sample_hash.view(-1, *[1] * elements.ndim) ^ elements
    return _mix(bits) >= int((rate - 0.5) * 2**32)


def _mix(bits: Tensor) -> Tensor:
    """Hash int32 bits, in place."""
    bits *= _MIX1
    bits ^= bits >> 15
    bits *= _MIX2
    return bits


def use_sample_dropout(net: nn.Module) -> None:
    """Replace the `nn.Dropout` layers of a network with `SampleDropout`, in place; the salt is a hash of the name."""
    for name, part in list(net.named_modules(remove_duplicate=False)):
        if type(part) is nn.Dropout:
            layer = SampleDropout()
            # Its mode too, as a frozen part is in that of evaluation; but not a call that it has compiled.
            vars(layer).update(part.__getstate__())
            net.set_submodule(name, layer)
    salt_by_name(net)


def salt_by_name(net: nn.Module) -> None:
    """Give each layer the salt of its name, which a copy has on any rank of a pipeline and in a resumed run."""
    for name, part in net.named_modules(remove_duplicate=False):
        if isinstance(part, SampleDropout):
            name = name.replace("_orig_mod.", "")  # of torch.compile
            part.salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def dropouts(net: nn.Module) -> list[SampleDropout]:
    """Return the layers of a network that take keys and have a probability above zero."""
    return [part for part in net.modules() if isinstance(part, SampleDropout) and part.p > 0]


def begin_step(layers: Iterable[SampleDropout]) -> None:
    """Count the calls of the layers from zero. The generator must have been seeded for the step."""
    for layer in layers:
        layer.numbers = {}


def forget_keys(layers: Iterable[SampleDropout]) -> None:
    """Let the layers draw as in torch."""
    for layer in layers:
        layer.keys = layer.sample_hash = layer.numbers = None


def set_keys(layers: Sequence[SampleDropout], keys: Tensor) -> None:
    """Set the (n,) int64 keys of the samples in the next forward pass."""
    salts = constant(tuple(layer.salt for layer in layers), torch.int64, keys.device)
    hashes = hash_samples(keys, salts[:, None])
    for layer, sample_hash in zip(layers, hashes, strict=True):
        layer.keys, layer.sample_hash = keys, sample_hash
