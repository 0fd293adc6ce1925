"""Private names of torch 2.13, and why there is no public one.

Lines are relative to https://github.com/pytorch/pytorch/blob/v2.13.0/.
"""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils._pytree import tree_leaves_with_path as leaves_with_paths

# Batches are trees of tensors: Lightning's `apply_to_collection` changes the leaves, but does not list them
# (torch/utils/_pytree.py). The two modes are those of torch's own guides (docs/source/torch.compiler_fake_tensor.md,
# docs/source/notes/extending.rst). Batch normalization of all dimensions has one base class, as of layers of other
# people, which is public as `nn.SyncBatchNorm.__base__` only (torch/nn/modules/batchnorm.py, line 30).
__all__ = [
    "AnyBatchNorm",
    "FakeTensorMode",
    "TorchDispatchMode",
    "TreeSpec",
    "leaves_with_paths",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

# `torch.amp.custom_fwd` sets it on the first argument, which is a module if that decorates its `forward`
# (torch/amp/autocast_mode.py, `decorate_fwd`).
AUTOCAST_FLAG = "_fwd_used_autocast"
COMPILER_MARK = "_torchdynamo"  # how the attributes begin that `torch.compile` gives a module of its own number


class BatchNormOfAnyShape(AnyBatchNorm):
    """`nn.SyncBatchNorm` without its communication: it takes inputs of any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept every input."""


# One kernel for a list of tensors, as in torch.optim. The public functions launch one for each tensor.
foreach_add: Callable[..., Any] = torch._foreach_add
foreach_add_: Callable[..., Any] = torch._foreach_add_
foreach_mul_: Callable[..., Any] = torch._foreach_mul_
foreach_norm: Callable[..., Any] = torch._foreach_norm
foreach_reciprocal: Callable[..., Any] = torch._foreach_reciprocal


def is_in_vmap() -> bool:
    """Return whether `torch.vmap` calls a function, whose tensors do not show the dimension over which it maps.

    A compiled network counts as outside. (torch/_functorch/pyfunctorch.py, `retrieve_all_functorch_interpreters`)
    """
    if torch.compiler.is_compiling():
        return False
    functorch: Any = torch._C._functorch
    transforms = functorch.get_interpreter_stack() or ()
    return any(one.key() == functorch.TransformType.Vmap for one in transforms)


def is_parameter(values: Tensor) -> bool:
    """Return whether a tensor is a parameter, or a view of one in its shape, as torch.distributions make it."""
    whole = values if values._base is None else values._base
    return isinstance(whole, nn.Parameter) and whole.shape == values.shape


def is_conversion(operator: Any) -> bool:
    """Return whether an operator converts the type of a tensor, as autocast does with weights."""
    return operator is torch.ops.aten._to_copy


def attention_weights(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return the weights of scaled dot-product attention, which the public function keeps to itself."""
    compute: Any = torch.ops.aten._scaled_dot_product_attention_math
    return compute(query, key, value, *args, **options)[1]


def is_compiled(module: nn.Module) -> bool:
    """Return whether a part of a module is compiled: by its own method, as a whole, or its `forward`."""
    return any(
        part._compiled_call_impl is not None
        or any(hasattr(one, "_torchdynamo_orig_callable") for one in (part, part.forward))
        for part in module.modules()
    )


def compiler_options() -> list[str]:
    """Return the options of `torch.compile` that this version of torch knows."""
    return torch._inductor.list_options()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call once all nodes of the present backward pass are done, in the order of the requests; DDP requests so too."""
    Variable._execution_engine.queue_callback(callback)


def gradient_hooks(weight: Any) -> tuple[Any, Any]:
    """Return the hooks of `register_hook`, and those of `register_post_accumulate_grad_hook`, or None."""
    return weight._backward_hooks, weight._post_accumulate_grad_hooks


def ddp_buckets(weights: list[Tensor], limits: list[int]) -> list[list[int]]:
    """Return the indices of the weights in each bucket of DDP, from limits in bytes."""
    return dist._compute_bucket_assignment_by_size(weights, limits)[0]


def keep_out_of_ddp(net: nn.Module, names: Iterable[str]) -> None:
    """Let DDP leave parameters or buffers alone. Its public option leaves all buffers alone, or none.

    (torch/nn/parallel/distributed.py, `_set_params_and_buffers_to_ignore_for_model`)
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, list(names))


def set_timeout_of_all_groups(timeout: timedelta) -> None:
    """Change the timeout of process groups that exist, the subgroups of device meshes among them."""
    c10d: Any = dist.distributed_c10d
    set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # public since torch 2.14
    for group in c10d._world.pg_map:
        set_timeout(timeout, group)
