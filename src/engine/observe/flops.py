"""FLOPs of a training step: matrix products and convolutions of the forward and the backward pass."""

import warnings
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops, measure_flops
from torch import nn
from torch.func import functional_call

from src.engine.determinism.batch import Batch

_DTYPES = {"64": torch.float64, "bf": torch.bfloat16, "16": torch.float16}
_NUM_SAMPLES = 2  # batch normalization needs more than one


class _Step(nn.Module):
    """The forward and the backward pass in one, because a network may recompute parts of itself in the second."""

    def __init__(self, module: Any, batch: Batch) -> None:
        super().__init__()
        self.module, self.batch = module, batch

    def forward(self) -> None:
        self.module.loss(self.module(self.batch.image), self.batch).backward()


def flops_per_sample(module: Any, image_shape: tuple[int, int, int]) -> float | None:
    """Return the FLOPs per training sample of a module that has `loss`, or None if its forward pass reads values.

    The measurement runs on the meta device: it computes nothing and changes no weight, buffer or random generator. It
    must run before a strategy shards or splits the network.

    Args:
        module: LightningModule with a method `loss(outputs, batch)`.
        image_shape: (channels, height, width).
    """
    image = torch.empty(_NUM_SAMPLES, *image_shape, dtype=module.dtype, device="meta")
    target = torch.empty(_NUM_SAMPLES, dtype=torch.int64, device="meta")
    step = _Step(module, Batch(image, target, sample_index=target, weight=target.to(module.dtype)))
    # Each tensor of each module once: functional_call cannot tie the weights of a module that has two names.
    tensors = [
        pair
        for prefix, part in step.named_modules()
        for named in (part.named_parameters, part.named_buffers)
        for pair in named(prefix, recurse=False, remove_duplicate=False)
    ]
    state = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad) for name, tensor in tensors
    }
    # Without this, dynamo would skip the compilation of these functions for the rest of the process.
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices=[]), eager:
        try:
            total = measure_flops(step, lambda: functional_call(step, state, (), tie_weights=False))
        except (RuntimeError, NotImplementedError):  # meta tensors have no values
            return None
    return total / _NUM_SAMPLES


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
