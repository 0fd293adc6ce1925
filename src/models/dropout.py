"""Dropout that does not depend on the hardware: a hash of (seed, epoch, sample, layer, element) decides each element.

torch draws from a generator, whose numbers depend on the rank, the micro-batch and the stage of a pipeline. The mixing
function is after C. Wellons, "Prospecting for hash functions" (https://nullprogram.com/blog/2018/07/31/), in
two's-complement 32-bit arithmetic. docs/results.md has its speed.
"""

import hashlib
import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)
_OTHER_KINDS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_OTHERWISE = "it draws from torch's generator, so that the run depends on the number of ranks"
_ODD = 0x2545F4914F6CDD1D
_GOLDEN, _MIX1, _MIX2 = -0x61C88647, 0x7FEB352D, -0x7B935975  # 0x9E3779B9 and 0x846CA68B as int32 holds them


class SampleDropout(nn.Dropout):
    """`nn.Dropout` by the keys of a training batch's samples; without keys it is torch's own.

    Attributes:
        keys: (n,) int64, one for each sample of the batch, or None.
        salt: tells the layers of a network apart.
    """

    keys: Tensor | None = None
    salt: int = 0

    def forward(self, input: Tensor) -> Tensor:
        if self.keys is None or not self.training or not 0 < self.p < 1:
            return super().forward(input)
        if len(input) != len(self.keys):
            _log.warning("a dropout layer sees %d rows for %d samples: %s", len(input), len(self.keys), _OTHERWISE)
            return super().forward(input)
        return input * self._kept(input[0].numel()).view(input.shape) / (1 - self.p)

    def _kept(self, count: int) -> Tensor:
        """Return which of `count` elements of each sample stay, (n, count)."""
        assert self.keys is not None
        own = (((self.keys ^ self.salt) * _ODD) >> 32).int()
        bits = own[:, None] ^ torch.arange(count, dtype=torch.int32, device=own.device) * _GOLDEN
        bits *= _MIX1
        bits ^= bits >> 15
        bits *= _MIX2
        return bits >= int((self.p - 0.5) * 2**32)


class DropPath(SampleDropout):
    """Drops whole samples of a residual branch (Huang et al., "Deep networks with stochastic depth", 2016)."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        ones = input.new_ones(len(input), *[1] * (input.ndim - 1))
        return input * super().forward(ones)


def drop_by_sample(net: nn.Module) -> None:
    """Let the dropout layers of a network go by samples, each with a salt that is a hash of its name."""
    for name, part in list(net.named_modules(remove_duplicate=False)):
        if type(part) is nn.Dropout:
            part = SampleDropout(part.p, part.inplace)
            net.set_submodule(name, part)
        elif isinstance(part, _OTHER_KINDS) and not isinstance(part, nn.Dropout) and part.p > 0:
            _log.warning("%s is a %s: %s", name, type(part).__name__, _OTHERWISE)
        if isinstance(part, SampleDropout):
            part.salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def dropouts(net: nn.Module) -> list[SampleDropout]:
    """Return the layers that take keys."""
    return [part for part in net.modules() if isinstance(part, SampleDropout) and part.p > 0]


def set_keys(layers: Iterable[SampleDropout], keys: Tensor) -> None:
    """Give the layers the keys of the samples that they see next, (n,) int64."""
    for layer in layers:
        layer.keys = keys
