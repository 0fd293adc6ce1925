"""Private names of FSDP2 in torch 2.13."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.weak import WeakIdKeyDictionary


def communication_in(wrap: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Return a context in which the methods that gather the weights of a block, or reduce its gradients, are wrapped.

    FSDP2 has no hooks there.
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)
    """
    methods = {name: getattr(FSDPParamGroup, name) for name in ("pre_forward", "pre_backward", "post_backward")}
    return mock.patch.multiple(FSDPParamGroup, **{name: wrap(method) for name, method in methods.items()})


def make_root(net: FSDPModule) -> None:
    """Let a network be the root of its blocks; torch takes the first module that is called, and then no other.

    (torch/distributed/fsdp/_fully_shard/_fsdp_state.py, `_lazy_init`)
    """
    net._get_fsdp_state()._lazy_init()


def let_data_write_shards() -> None:
    """Let `weight.data = value` write a sharded weight, as many moving averages do; torch ignores it in silence.

    The attribute is that of a tensor without elements, beside the shard (torch/csrc/autograd/python_variable.cpp).
    FSDP keeps the memory of the shard, so it gets the values; what `weight.data` returned before keeps the old ones.
    """
    DTensor.data = property(_read, _write)  # type: ignore[assignment]


def let_numbers_be_of_all_shards() -> None:
    """Let what reduces a sharded tensor, such as the norm of a gradient, be the same Python number on every rank.

    torch takes the number of this rank's shard, in silence, and each rank would clip its shard otherwise.
    (torch/distributed/tensor/_dispatch.py: `aten._local_scalar_dense` computes with local tensors)
    Every rank must ask for the number.
    """
    for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
        setattr(DTensor, name, _of_whole(getattr(Tensor, name)))


def _of_whole(method: Callable[[Tensor], Any]) -> Callable[[DTensor], Any]:
    """Return a method of a sharded tensor that first gathers the whole one."""

    def of_whole(tensor: DTensor) -> Any:
        # Within `torch.tensor([...])` a collective would crash; torch itself raises an error there.
        can_compute = not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
        return method(tensor.full_tensor() if can_compute else tensor)

    return of_whole


_returned = WeakIdKeyDictionary()  # by weight: references to what its attribute has returned


def _read(weight: DTensor) -> Tensor:
    """Return a tensor with the memory of a weight."""
    found = Tensor.data.__get__(weight)
    _returned[weight] = [one for one in _returned.get(weight, []) if one() is not None] + [weakref.ref(found)]
    return found


def _write(weight: DTensor, value: Tensor) -> None:
    """Write a value into a sharded weight, which every rank must do."""
    with torch.no_grad():
        if not isinstance(value, DTensor):  # the whole tensor, which every rank has
            value = distribute_tensor(value.detach(), weight.device_mesh, weight.placements, src_data_rank=None)
        for earlier in [one() for one in _returned.pop(weight, [])]:
            if earlier is not None:
                earlier._local_tensor = earlier._local_tensor.clone()
        weight.copy_(value)
