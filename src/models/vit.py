"""A vision Transformer with patches for 32 x 32 images.

Dosovitskiy et al., "An image is worth 16 x 16 words" (2020), in the size of DeiT-Tiny (Touvron et al., 2020): twelve
equal layers of width 192 with three heads, a class token and learned positions. Patches of 4 x 4 pixels make 64 tokens
per image. The network has 5,362,762 parameters for ten classes; the published one for ImageNet has 5,717,416.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecurve import DropPath, UserError
from src.models.options import check_probabilities, check_sizes


def vit(
    num_classes: int,
    image_shape: Sequence[int],
    patch: int = 4,
    width: int = 192,
    depth: int = 12,
    heads: int = 3,
    mlp_ratio: int = 4,
    dropout: float = 0.0,
    drop_path: float = 0.0,
) -> nn.Sequential:
    """Return the network as a sequence of blocks: `embed`, `depth` equal layers and `head`.

    It maps (n, channels, height, width) images to (n, num_classes) logits.

    Args:
        image_shape: (channels, height, width) of the images; height and width are multiples of `patch`.
        patch: side of a patch in pixels.
        width: embedding dimension, a multiple of `heads`.
        mlp_ratio: hidden units of the MLP in multiples of `width`.
        dropout: probability of dropping an element after the embedding, the attention and both layers of the MLP.
        drop_path: stochastic depth rate of the last layer; it rises linearly from zero at the first layer.
    """
    check_sizes(patch=patch, width=width, depth=depth, heads=heads, mlp_ratio=mlp_ratio)
    check_probabilities(dropout=dropout, drop_path=drop_path)
    channels, *size = image_shape
    if any(side % patch for side in size):
        raise UserError(f"model.patch={patch} does not tile images of {size[0]} x {size[1]}: take a divisor")
    if width % heads:
        raise UserError(f"model.heads={heads} does not divide model.width={width}: take a divisor")
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    blocks["embed"] = _Embed(channels, (size[0] // patch) * (size[1] // patch), patch, width, dropout)
    for number in range(depth):
        rate = drop_path * number / max(1, depth - 1)
        blocks[f"layer{number + 1}"] = _Layer(width, heads, mlp_ratio * width, dropout, rate)
    blocks["head"] = _Head(width, num_classes)
    net = nn.Sequential(blocks)
    net.apply(_initialize)
    return net


class _Embed(nn.Module):
    """Embedding of patches, with a class token first and learned positions.

    It maps (n, channels, height, width) images to (n, patches + 1, width) tokens.
    """

    def __init__(self, channels: int, patches: int, patch: int, width: int, dropout: float) -> None:
        super().__init__()
        self.projection = nn.Conv2d(channels, width, patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, patches + 1, width) * 0.02)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.projection(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(patches), -1, -1), patches], 1)
        return self.dropout(tokens + self.position)


class _Layer(nn.Module):
    """A pre-norm Transformer layer: attention and a multi-layer perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.attention = _Attention(width, heads, dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )
        self.drop_path1, self.drop_path2 = DropPath(drop_path), DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.attention(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class _Attention(nn.Module):
    """Multi-head self-attention over (n, tokens, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        query, key, value = self.qkv(x).view(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.dropout(self.projection(mixed.transpose(1, 2).reshape(n, tokens, width)))


class _Head(nn.Module):
    """Classification of the class token: (n, tokens, width) to (n, num_classes) logits."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x[:, 0]))


def _initialize(part: nn.Module) -> None:
    if isinstance(part, nn.Linear):
        nn.init.trunc_normal_(part.weight, std=0.02)
        nn.init.zeros_(part.bias)
