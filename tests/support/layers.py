"""Layers of the small networks in `zoo.py`, each written as its library or its paper writes it."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 4
CLASSES = 10


def stem() -> nn.Module:
    """Return a layer that maps images to (n, WIDTH, 8, 8) activations."""
    return nn.Conv2d(3, WIDTH, 4, stride=4)


def conv(inputs: int = WIDTH) -> nn.Module:
    return nn.Conv2d(inputs, WIDTH, 3, padding=1)


def conv_norm(inputs: int = WIDTH) -> nn.Module:
    return nn.Sequential(conv(inputs), nn.BatchNorm2d(WIDTH), nn.ReLU())


def head(inputs: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


class Residual(nn.Module):
    """Adds a layer of one's own, in training or in both modes, to the branch of a residual block."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv, self.layer = conv(), layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.conv(x))


class Apply(nn.Module):
    """Calls a function of the activations and the mode, as the forward pass of a layer of one's own."""

    def __init__(self, function: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.training)


class SqueezeExcitation(nn.Module):
    """Hu et al. (2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(WIDTH, 2, 1), nn.Conv2d(2, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))).sigmoid()


class Attention(nn.Module):
    """An attention block of a transformer."""

    def __init__(self, dropout: float = 0.0, batch_first: bool = True) -> None:
        super().__init__()
        self.norm, self.batch_first = nn.LayerNorm(WIDTH), batch_first
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x if self.batch_first else x.transpose(0, 1))
        mixed = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return x + (mixed if self.batch_first else mixed.transpose(0, 1))


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm writes it (`timm/layers/norm_act.py`)."""

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        exponential_average_factor = self.momentum or 0.0
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            exponential_average_factor = self.momentum or 1.0 / float(self.num_batches_tracked)
        is_training = self.training or (self.running_mean is None and self.running_var is None)
        has_statistics = not self.training or self.track_running_stats
        x = F.batch_norm(
            x,
            self.running_mean if has_statistics else None,
            self.running_var if has_statistics else None,
            self.weight,
            self.bias,
            is_training,
            exponential_average_factor,
            self.eps,
        )
        return self.act(self.drop(x))


def drop_path(x: Tensor, training: bool) -> Tensor:
    """Drop the branch of a sample as timm does (`timm/layers/drop.py`)."""
    if not training:
        return x
    keep = 0.8
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    mask = x.new_empty(shape).bernoulli_(keep)
    return x * mask.div_(keep)


class Centered(nn.Module):
    """Subtracts a moving average of its inputs."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 2, 3)), 0.1)
        return x - self.mean[:, None, None]


class Checkpointed(nn.Module):
    """Recomputes its layers in the backward pass."""

    def __init__(self, *layers: nn.Module, use_reentrant: bool = False) -> None:
        super().__init__()
        self.layers, self.use_reentrant = nn.Sequential(*layers), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=self.use_reentrant)


class CountsPasses(nn.Module):
    """Counts the forward passes of training."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return x.relu()


class EncoderLayer(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.1, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.layer.self_attn.batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "squeeze_excitation": lambda: nn.Sequential(nn.BatchNorm2d(WIDTH), nn.ReLU(), SqueezeExcitation()),
    "instance_norm": lambda: nn.Sequential(nn.InstanceNorm2d(WIDTH), nn.ReLU()),
    "group_norm": lambda: nn.Sequential(nn.GroupNorm(2, WIDTH), nn.ReLU()),
    "timm": lambda: nn.Sequential(BatchNormAct2d(WIDTH), SqueezeExcitation(), Apply(drop_path)),
    # Layers with a state, or with random numbers of their own
    "checkpointed_dropout": lambda: Checkpointed(conv(), nn.Dropout(0.1)),
    "checkpointed_dropout_reentrant": lambda: Checkpointed(conv(), nn.Dropout(0.1), use_reentrant=True),
    "checkpointed_norm": lambda: Checkpointed(conv_norm()),
    "checkpointed_norm_reentrant": lambda: Checkpointed(conv_norm(), use_reentrant=True),
    "centered": Centered,
    "counts_passes": CountsPasses,
    "instance_norm_tracking": lambda: nn.InstanceNorm2d(WIDTH, track_running_stats=True),
    "spectral_norm": lambda: nn.Sequential(nn.ReLU(), spectral_norm(conv())),
    "functional_dropout": lambda: Apply(lambda x, training: F.dropout(x, 0.1, training)),
    "rrelu": nn.RReLU,
    "alpha_dropout": lambda: nn.AlphaDropout(0.1),
    "dropout2d": lambda: nn.Dropout2d(0.1),
    "noise": lambda: Apply(lambda x, training: x + 0.1 * torch.randn_like(x) if training else x),
    "random_scale": lambda: Apply(lambda x, training: x * (0.5 + torch.rand(())) if training else x),
    "python_random": lambda: Apply(lambda x, training: x * (0.5 + random.random()) if training else x),
    "numpy_random": lambda: Apply(lambda x, training: x * (0.5 + float(np.random.rand())) if training else x),
    # Blocks of `ClassToken`
    "attention": Attention,
    "attention_dropout": lambda: Attention(0.1),
    "attention_dropout_tokens_first": lambda: Attention(0.1, batch_first=False),
    "encoder": lambda: EncoderLayer(batch_first=True),
    "encoder_tokens_first": lambda: EncoderLayer(batch_first=False),
}
