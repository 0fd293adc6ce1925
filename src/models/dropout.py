"""Dropout that does not depend on the hardware: a hash of (seed, epoch, sample, layer, element) decides each element.

torch's dropout uses a random generator, whose numbers depend on the rank, the micro-batch and the pipeline stage. The
hash function follows C. Wellons, "Prospecting for hash functions" (https://nullprogram.com/blog/2018/07/31/), in
two's-complement 32-bit arithmetic. docs/benchmarks/dropout.md has its speed.
"""

import hashlib
import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)
_UNSUPPORTED_TYPES = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANK_DEPENDENT = "it draws from torch's generator, so that the run depends on the number of ranks"
_ODD_MULTIPLIER = 0x2545F4914F6CDD1D
# int32 holds the constants 0x9E3779B9 and 0x846CA68B as negative numbers.
_GOLDEN, _MIX1, _MIX2 = -0x61C88647, 0x7FEB352D, -0x7B935975


class SampleDropout(nn.Dropout):
    """`nn.Dropout` whose mask is a hash of the samples' keys; without keys it is torch's own dropout.

    Attributes:
        keys: (n,) int64, one for each sample of the batch, or None.
        salt: hash of the layer's name, so that the layers of a network have different masks.
    """

    keys: Tensor | None = None
    salt: int = 0
    _has_warned = False

    def forward(self, input: Tensor) -> Tensor:
        if self.keys is None or not self.training or not 0 < self.p < 1:
            return super().forward(input)
        if len(input) != len(self.keys):
            if not self._has_warned:
                _log.warning(
                    "a dropout layer sees %d rows for %d samples: %s", len(input), len(self.keys), _RANK_DEPENDENT
                )
                self._has_warned = True
            return super().forward(input)
        return input * self._keep_mask(input[0].numel()).view(input.shape) / (1 - self.p)

    def _keep_mask(self, count: int) -> Tensor:
        """Return the (n, count) bool mask of the elements to keep, for `count` elements of each sample."""
        assert self.keys is not None
        sample_hash = (((self.keys ^ self.salt) * _ODD_MULTIPLIER) >> 32).int()
        elements = torch.arange(count, dtype=torch.int32, device=sample_hash.device)
        bits = sample_hash[:, None] ^ elements * _GOLDEN
        bits *= _MIX1
        bits ^= bits >> 15
        bits *= _MIX2
        return bits >= int((self.p - 0.5) * 2**32)


class DropPath(SampleDropout):
    """Drops the residual branch of a random subset of the samples: stochastic depth.

    Huang et al., "Deep networks with stochastic depth" (2016).
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        ones = input.new_ones(len(input), *[1] * (input.ndim - 1))
        return input * super().forward(ones)


def use_sample_dropout(net: nn.Module) -> None:
    """Replace the `nn.Dropout` layers of a network with `SampleDropout`, in place; the salt is a hash of the name."""
    for name, part in list(net.named_modules(remove_duplicate=False)):
        if type(part) is nn.Dropout:
            part = SampleDropout(part.p, part.inplace)
            net.set_submodule(name, part)
        elif isinstance(part, _UNSUPPORTED_TYPES) and not isinstance(part, nn.Dropout) and part.p > 0:
            _log.warning("%s is a %s: %s", name, type(part).__name__, _RANK_DEPENDENT)
        if isinstance(part, SampleDropout):
            part.salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def dropouts(net: nn.Module) -> list[SampleDropout]:
    """Return the layers of a network that take keys and have a probability above zero."""
    return [part for part in net.modules() if isinstance(part, SampleDropout) and part.p > 0]


def set_keys(layers: Iterable[SampleDropout], keys: Tensor) -> None:
    """Set the (n,) int64 keys of the samples in the next forward pass."""
    for layer in layers:
        layer.keys = keys
