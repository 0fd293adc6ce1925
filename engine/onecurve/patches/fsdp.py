"""Private names of FSDP2 in torch 2.13."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def communication_in(wrap: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Return a context in which the methods that gather the weights of a block, or reduce its gradients, are wrapped.

    FSDP2 has no hooks there.
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)
    """
    methods = {name: getattr(FSDPParamGroup, name) for name in ("pre_forward", "pre_backward", "post_backward")}
    return mock.patch.multiple(FSDPParamGroup, **{name: wrap(method) for name, method in methods.items()})
