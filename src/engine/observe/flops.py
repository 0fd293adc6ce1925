"""FLOPs of a training step: matrix products and convolutions of the forward and the backward pass."""

import copy
import warnings
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

_DTYPES = {"64": torch.float64, "bf": torch.bfloat16, "16": torch.float16}
_NUM_SAMPLES = 2  # batch normalization needs more than one


def flops_per_sample(net: Any, input_shape: tuple[int, ...]) -> float | None:
    """Return the FLOPs per training sample of a network, or None if its forward pass reads values.

    A copy with tensors of the meta device computes nothing, and leaves weights, buffers and random generators alone.
    The network must be neither sharded, split nor compiled.
    """
    weights = list(net.parameters())
    meta = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in (*weights, *net.buffers())}
    for weight in weights:
        meta[id(weight)].requires_grad_(weight.requires_grad)
    inputs = torch.empty(_NUM_SAMPLES, *input_shape, dtype=weights[0].dtype, device="meta")
    with FlopCounterMode(display=False) as counter:
        try:
            copy.deepcopy(net, meta)(inputs).sum().backward()
        except (RuntimeError, NotImplementedError):  # meta tensors have no values
            return None
    return counter.get_total_flops() / _NUM_SAMPLES


def peak_flops(trainer: L.Trainer, module: L.LightningModule) -> float | None:
    """Return the peak FLOP/s of a device in the precision of the run, or None if Lightning does not list it.

    cuDNN convolves float32 in TF32 by default, but matrix products are exact by default.
    """
    dtype = _DTYPES.get(str(trainer.precision)[:2], torch.float32)
    convolves = any(isinstance(part, nn.Conv2d) for part in module.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns if it does not list the device
        if dtype is torch.float32 and convolves and torch.backends.cudnn.allow_tf32:
            return get_available_flops(module.device, "tfloat32") or get_available_flops(module.device, dtype)
        return get_available_flops(module.device, dtype)
