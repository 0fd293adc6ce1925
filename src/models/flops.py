"""What a training step costs in floating-point operations: matrix products and convolutions, forward and back."""

import warnings
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops, measure_flops
from torch.func import functional_call

from src.data.batch import Batch

_TYPES = {"64": torch.float64, "bf": torch.bfloat16, "16": torch.float16}
_SAMPLES = 2  # batch normalisation wants more than one


def flops_per_sample(module: Any, image_shape: tuple[int, int, int]) -> float:
    """Of a module with `loss`, on the meta device: nothing is computed, and no weight, buffer or generator touched.

    It must be asked before a strategy takes the network apart.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    state = {name: torch.empty_like(held, device="meta").requires_grad_(held.requires_grad) for name, held in tensors}
    image = torch.empty(_SAMPLES, *image_shape, dtype=module.dtype, device="meta")
    target = torch.empty(_SAMPLES, dtype=torch.int64, device="meta")
    batch = Batch(image, target, sample_index=target, weight=target.to(module.dtype))
    eager = torch.compiler.set_stance("force_eager")  # or dynamo would never again compile what it sees here
    with torch.random.fork_rng(devices=[]), eager:
        total = measure_flops(module, lambda: functional_call(module, state, image), lambda y: module.loss(y, batch))
    return total / _SAMPLES


def peak_flops(trainer: L.Trainer, device: torch.device) -> float | None:
    """What one device could do per second in the run's precision, where Lightning knows it."""
    dtype = _TYPES.get(str(trainer.precision)[:2], torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not is no news
        return get_available_flops(device, dtype)
