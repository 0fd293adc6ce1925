"""One rank of a process group whose collectives do nothing: torch/testing/_internal/distributed/fake_pg.py."""

import os
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
from lightning.pytorch.trainer.connectors import data_connector
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine.dev.dry_gpu.cases import DEVICES
from onecurve.process.consensus import RankConsensus


def start_process_group(rank: int, world: int) -> None:
    """Start the group before Lightning would; it then uses this one."""
    per_node = min(DEVICES, world)
    variables: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": per_node,
    }
    variables |= {"GROUP_RANK": rank // per_node, "TORCHELASTIC_RUN_ID": "dry-gpu"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in variables.items()})
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    connector: Any = data_connector
    connector._InfiniteBarrier = nullcontext  # a barrier over gloo, which needs the other ranks
    # All ranks ask each other about once a second whether to stop, and wait: it is meant, and depends on the clock.
    RankConsensus.poll = lambda *_: 0  # type: ignore[method-assign]
    _replace_collectives()
    _replace_reducer()
    _replace_buckets()


def _replace_collectives() -> None:
    """Replace collectives whose results are read: objects travel as tensors, which here have no data."""
    module: Any = dist
    # Every rank keeps its own object, as if all ranks had the same.
    module.broadcast_object_list = module.distributed_c10d.broadcast_object_list = _do_nothing
    module.all_gather_object = _keep_own_object
    all_reduce = module.all_reduce
    module.all_reduce = lambda tensor, *args, **kwargs: all_reduce(tensor, *args, **kwargs) and _Work(tensor)


def _keep_own_object(objects: list[Any], own: Any, *_: Any, **__: Any) -> None:
    objects[:] = [own] * len(objects)


def _replace_reducer() -> None:
    """Let the C++ part of DistributedDataParallel work without data."""
    module: Any = ddp
    module._verify_param_shape_across_processes = _do_nothing  # compares the shapes in the data of a tensor
    module._sync_module_states = _do_nothing  # sends the data of all tensors
    module.DistributedDataParallel._check_comm_hook = _do_nothing  # asks for the version of CUDA
    init, forward = ddp.DistributedDataParallel.__init__, ddp.DistributedDataParallel.forward

    def init_without_unused(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs | {"find_unused_parameters": False})  # the map of used ones has no data

    def prepare_and_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.reducer, _Reducer):
            if not self._comm_hooks:
                self.register_comm_hook(None, _all_reduce)
            self.logger = MagicMock()  # reads the timers of CUDA
            self.reducer = _Reducer(self.reducer)
        return forward(self, *args, **kwargs)

    ddp.DistributedDataParallel.__init__ = init_without_unused  # type: ignore[method-assign]
    ddp.DistributedDataParallel.forward = prepare_and_forward  # type: ignore[method-assign]


def _replace_buckets() -> None:
    """Let DistributedDataParallel start with the buckets that its first step leads to: ranks agree on them by data."""
    module: Any = ddp
    config, assign = module._BucketCapacityConfig, dist._compute_bucket_assignment_by_size
    limits = config.compute_bucket_size_limits

    def assign_in_order_of_gradients(weights: list[Tensor], *args: Any) -> tuple[list[list[int]], list[int]]:
        buckets, sizes = assign(weights[::-1], *args)  # the last weights have their gradients first
        own = [[len(weights) - 1 - number for number in bucket] for bucket in buckets]
        return own[::-1], sizes[::-1]  # the caller reverses both

    config.compute_bucket_size_limits = lambda self, **_: limits(self, static_graph=False, find_unused_parameters=True)
    module.dist._compute_bucket_assignment_by_size = assign_in_order_of_gradients


class _Work:
    """A finished collective. The future of the fake group's own one has no result, which hooks of DDP need."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self, *_: Any) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([self._tensor])
        return future


class _Reducer:
    """The reducer of DistributedDataParallel, except that it keeps its buckets, which `_replace_buckets` has chosen."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return _do_nothing if name == "_rebuild_buckets" else getattr(self._reducer, name)


def _all_reduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket as the reducer does without a hook, but through `_Work`."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _do_nothing(*_: Any, **__: Any) -> None: ...
