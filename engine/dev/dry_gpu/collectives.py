"""Describe collectives as the rank that calls them sees them, in the same words as a plan has for them."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "send",
}


def describe(kind: str, nbytes: int, ranks: int) -> str:
    """Return the line that counts equal collectives: kind, bytes of the full tensor, and ranks of the group."""
    return f"{kind} of {nbytes} bytes by {ranks} ranks"


def describe_call(func: Any, args: Any) -> str:
    """Describe the call of an operation of torch's namespace `c10d`; a send and a receive are the same."""
    name = func.overloadpacket.__name__
    kind = _KINDS.get(name, name)
    nbytes = max(tensor.nbytes for tensor in tree_leaves(args[:2]) if isinstance(tensor, torch.Tensor))
    group = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
    return describe(kind, nbytes, 2 if kind == "send" else dist.ProcessGroup.unbox(group).size())
