"""Networks of the benchmark by name: how hand-written programs build them, and the overrides for `train.py`."""

from functools import partial

import torch

from src.models.mlp import mlp
from src.models.resnet import resnet18
from src.models.resnet9 import resnet9

NETS = {
    "tiny": partial(mlp, num_classes=10, image_shape=[3, 32, 32], hidden=[16]),
    "resnet9w4b32": partial(resnet9, num_classes=10, width=4),
    "resnet9w4": partial(resnet9, num_classes=10, width=4),
    "resnet9": partial(resnet9, num_classes=10),
    "resnet18": partial(resnet18, num_classes=10),
}
OVERRIDES = {
    "tiny": ["model=mlp", "model.hidden=[16]"],
    "resnet9w4b32": ["model=resnet9", "model.width=4", "data.batch_size=32", "module.lr_scaling=none"],
    "resnet9w4": ["model=resnet9", "model.width=4"],
    "resnet9": ["model=resnet9"],
    "resnet18": ["model=resnet18"],
}
BATCH = {"resnet9w4b32": 32}  # others: 128
LAYOUT = {"tiny": torch.contiguous_format}  # others: channels last, for convolutions
