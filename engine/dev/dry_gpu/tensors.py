"""Stubs that let a training run use fake tensors, and that record the synchronizations of operations.

Fake tensors have a shape, a type and a device, but no data: torch/_subclasses/fake_tensor.py.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.serialization import skip_data
from torch.utils._foreach_utils import _foreach_supported_types as _foreach_types

from engine.dev.dry_gpu.synchronizations import SYNCHRONIZATIONS

_torch_deepcopy, _torch_numpy, _torch_save = Tensor.__deepcopy__, Tensor.numpy, torch.save
_libraries: list[torch.library.Library] = []  # a library that is collected unregisters its kernels


def install_tensors() -> None:
    """Replace the functions of torch that fail for fake tensors on the fake device."""
    mode: Any = FakeTensorMode
    mode.avoid_device_init = property(lambda self: True)  # each new tensor would initialize CUDA by an allocation
    handlers: Any = fake_impls.op_implementations_dict
    handlers[torch.ops.aten._local_scalar_dense.default] = _item  # there is no value: torch raises an error
    handlers[torch.ops.aten.nonzero.default] = _nonzero  # the number of elements is unknown: torch raises an error
    handlers[torch.ops.aten.is_pinned.default] = lambda *_: True  # DDP asserts that what it pins is pinned
    # As above: weights differ from what they were, and a traced network computes what the network does.
    handlers[torch.ops.aten.equal.default] = partial(_compare, False)
    handlers[torch.ops.aten.allclose.default] = partial(_compare, True)
    tensor: Any = Tensor
    tensor.pin_memory = lambda self, *_: self  # the allocator of pinned memory belongs to CUDA
    tensor.numpy = _numpy  # torch would read the data
    tensor.__deepcopy__ = _deepcopy  # torch would copy the storage
    nn.Module._apply = _apply  # type: ignore[method-assign]
    torch.save = _save  # torch would pickle the mode of a fake tensor
    for types in (_optimizer_types, _foreach_types):
        types.append(FakeTensor)  # otherwise optimizers and clipping treat each tensor separately
    torch.autograd.set_multithreading_enabled(False)  # one FakeTensorMode cannot serve a thread for each device
    _implement_kernels()


def _item(mode: Any, func: Any, tensor: FakeTensor) -> Any:
    """Return a value of the type, when the host asks for it.

    A float is 0, so that a GradScaler finds no overflow. An integer is 1 and a bool true, so that all ranks of a
    pipeline agree to know its shapes (`PipelineStage`), and all weights are finite.
    """
    if tensor.fake_device.type == "cuda":
        SYNCHRONIZATIONS.report("item")
    if tensor.constant is not None:
        return tensor.constant.item()
    return True if tensor.dtype == torch.bool else 0.0 if tensor.dtype.is_floating_point else 1


def _nonzero(mode: Any, func: Any, tensor: FakeTensor) -> Tensor:
    """Return the indices as if one element per row were not zero."""
    if tensor.fake_device.type == "cuda":
        SYNCHRONIZATIONS.report("nonzero or boolean mask")
    return tensor.new_empty(tensor.shape[0] if tensor.ndim else 1, max(1, tensor.ndim), dtype=torch.int64)


def _compare(answer: bool, mode: Any, func: Any, first: Tensor, second: Tensor, *_: Any) -> bool:
    """Answer the host's question whether two tensors are equal."""
    if "cuda" in (first.device.type, second.device.type):
        SYNCHRONIZATIONS.report(func.overloadpacket.__name__)
    return answer


def _numpy(self: Tensor, *, force: bool = False) -> Any:
    if isinstance(self, FakeTensor):
        return np.zeros(self.shape, str(self.dtype).removeprefix("torch."))
    with unset_fake_temporarily():  # otherwise the array is that of a fake alias
        return _torch_numpy(self, force=force)


def _deepcopy(self: Tensor, memo: Any) -> Tensor:
    if isinstance(self, FakeTensor):
        return self.detach().clone().requires_grad_(self.requires_grad)
    return _torch_deepcopy(self, memo)


def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """Convert a module as `nn.Module._apply` does; that one swaps real tensors with fake ones, which fails."""
    if recurse:
        for child in self.children():
            child._apply(fn)
    for name, weight in self._parameters.items():
        if weight is not None:
            with torch.no_grad():
                new = fn(weight)
            if new is not weight:
                self._parameters[name] = nn.Parameter(new, weight.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _save(*args: Any, **kwargs: Any) -> None:
    """Save fake tensors as real ones, without data."""
    with skip_data(materialize_fake_tensors=True):
        _torch_save(*args, **kwargs)


def _implement_kernels() -> None:
    """Give the shapes of torch's kernels without a meta implementation: batch normalization, fused optimizers."""

    def channels(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        half = x.dtype in (torch.bfloat16, torch.float16)
        return x.new_empty(x.shape[1], dtype=dtype or (torch.float32 if half else x.dtype))

    def sums(grad: Tensor, x: Tensor, mean: Any, invstd: Any, weight: Any, input_g: bool, *needs: bool) -> Any:
        gradients = [channels(x, weight.dtype) if need else None for need in needs]
        return channels(x), channels(x), *gradients

    library = torch.library.Library("aten", "IMPL", "Meta")
    _libraries.append(library)
    library.impl("batch_norm_stats", lambda x, eps: (channels(x), channels(x)))
    library.impl("batch_norm_gather_stats", lambda x, *_: (channels(x), channels(x)))
    library.impl("batch_norm_gather_stats_with_counts", lambda x, *_: (channels(x), channels(x)))
    library.impl("batch_norm_elemt", lambda x, *_: torch.empty_like(x))
    library.impl("batch_norm_backward_reduce", sums)
    library.impl("batch_norm_backward_elemt", lambda grad, x, *_: torch.empty_like(x))
    for name in ("_fused_sgd_", "_fused_adagrad_"):  # in place
        library.impl(name, lambda *args, **kwargs: None)
