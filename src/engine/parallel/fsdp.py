"""FSDP2: weights, gradients and optimizer state sharded over the ranks, with weights gathered one block at a time.

The strategy applies `torch.distributed.fsdp.fully_shard` to the network. Lightning's ModelParallelStrategy leaves this
to the module. Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel" (2023).
"""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from src.engine.parallel.sharded_state import ShardedStateStrategy
from src.engine.utils.errors import UserError


class FSDP(ShardedStateStrategy):
    """Gives every rank its part of the data and its shard of each tensor.

    Args:
        replicas: number of groups of ranks that each hold the full network, sharded within the group (HSDP). One group
            is plain FSDP.
        reshard_after_forward: free the gathered weights of a block after its forward pass, and gather them again for
            the backward pass. This needs less memory and 1.5 times the communication.
        param_dtype: type in which weights are gathered, such as `bfloat16`; null means the type they are stored in.
            `trainer.precision=bf16-mixed` is different: it is autocast, as under every strategy.
        reduce_dtype: type in which gradients are reduced; null means their own type.
        **kwargs: arguments of ShardedStateStrategy.

    Raises:
        UserError: if `replicas` does not divide the number of ranks, or there is no such type.
    """

    def __init__(
        self,
        replicas: int = 1,
        reshard_after_forward: bool = True,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.replicas, self.reshard_after_forward = replicas, reshard_after_forward
        self.policy = MixedPrecisionPolicy(_dtype("param_dtype", param_dtype), _dtype("reduce_dtype", reduce_dtype))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank, "shares": self.shares}

    def setup_environment(self) -> None:
        self._setup_distributed()
        if self.replicas < 1 or self.world_size % self.replicas:
            raise UserError(
                f"strategy.replicas={self.replicas} does not divide the {self.world_size} processes: "
                "take a divisor, or change trainer.devices"
            )
        shape, names = (self.replicas, self.world_size // self.replicas), ("replicate", "shard")
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self._device_mesh = mesh if self.replicas > 1 else mesh["shard"]

    def parallelize(self, module: L.LightningModule) -> None:
        """Shard each network of the module; each of its blocks is gathered on its own.

        Raises:
            UserError: if a parameter belongs to the module itself, outside of its networks.
        """
        in_networks = {weight for net in _networks(module) for weight in net.parameters()}
        if own := [name for name, weight in module.named_parameters() if weight not in in_networks]:
            raise UserError(
                f"strategy=fsdp gathers the weights of a network when it is called, but {own[0]} belongs to "
                f"{type(module).__name__} itself: move it into a network, or use strategy=ddp"
            )
        for net in _networks(module):
            self._shard(net)

    def _shard(self, net: nn.Module) -> None:
        net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # FSDP supports no other format
        if self.policy.param_dtype:
            # Batch statistics stay in full precision, so the weights of these layers must too: no policy.
            for norm in [module for module in net.modules() if isinstance(module, _BatchNorm)]:
                fully_shard(norm, mesh=self.device_mesh)
        options: dict[str, Any] = {"reshard_after_forward": self.reshard_after_forward, "mp_policy": self.policy}
        for module in [*_networks(net), net]:
            fully_shard(module, mesh=self.device_mesh, **options)


def _networks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module that have parameters and a forward pass; a list stands for its modules."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _networks(child)
        elif not isinstance(child, nn.ParameterList | nn.ParameterDict) and next(child.parameters(), None) is not None:
            yield child


def _dtype(option: str, name: str | None) -> torch.dtype | None:
    found = getattr(torch, name, None) if name else None
    if name and not isinstance(found, torch.dtype):
        raise UserError(f"strategy.{option}={name} is no data type of torch: take bfloat16, float16 or float32")
    return found
