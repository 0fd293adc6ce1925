"""FSDP2: weights, gradients and optimizer state sharded over the ranks, with weights gathered one block at a time.

The strategy applies `torch.distributed.fsdp.fully_shard` to the network. Lightning's ModelParallelStrategy leaves this
to the module. Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel" (2023).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS

from onecurve.errors import UserError
from onecurve.parallel.gradients import weights_of
from onecurve.parallel.sharded_state import ShardedStateStrategy, prepare_to_shard
from onecurve.parallel.tree_sum import TreeSum
from onecurve.patches.fsdp import make_root
from onecurve.patches.torch import AnyBatchNorm
from onecurve.process.devices import map_large_blocks
from onecurve.process.layer_calls import record_layer_calls

_READS_SHARDS = (
    "training_step reads weights outside of the forward pass of their network, where each rank has only a shard: let "
    "that forward pass return the term"
)
# By words of an error of torch: what a step does that FSDP cannot, and what to write instead.
_PROBLEMS = {
    "DTensor": _READS_SHARDS,
    "sharding": _READS_SHARDS,
    "RegisterPostBackwardFunction": (
        "a layer changes a tensor in place that it has been given, such as total += term: write total = total + term"
    ),
    "FSDP does not support deepcopy": "training_step copies a network, of which a rank has only shards: leave it out",
}


class _TreeReduceScatter:
    """The communication in which FSDP2 adds the gradients of a round: the order is that of `tree_sum.py`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        received, tree = torch.empty_like(input_tensor), TreeSum()
        dist.all_to_all_single(received, input_tensor, group=group)
        for rank, part in enumerate(received.view(dist.get_world_size(group), -1)):
            tree.add([part], rank)
        output_tensor.copy_(tree.nodes[0, dist.get_world_size(group)][0].view_as(output_tensor))


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
    """

    hardware_options: Sequence[str] = ("replicas", "reshard_after_forward")  # and those of the base

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
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self._shard_group: Any = None
        self.policy = MixedPrecisionPolicy(_dtype("param_dtype", param_dtype), _dtype("reduce_dtype", reduce_dtype))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        processes = self.num_nodes * self.num_processes  # not `world_size`, which is 1 in `configure_optimizers`
        ranks = {"num_replicas": processes, "rank": self.global_rank, "shares": self.shares}
        return ranks | {"in_turn": True, "model_group": self._shard_group}

    def check_world_size(self, world_size: int) -> None:
        """Raise a UserError unless the groups can have equal numbers of ranks; an elastic launcher asks as well."""
        if self.replicas < 1 or world_size % self.replicas:
            raise UserError(
                f"strategy.replicas={self.replicas} does not divide the {world_size} processes: "
                "take a divisor, or change trainer.devices"
            )

    def check_virtual_ranks(self, count: int, world_size: int) -> None:
        """Raise a UserError unless every rank can compute a virtual rank in each round."""
        if self.replicas > 1 or self.shares:
            option = f"shares={list(self.shares)}" if self.shares else f"replicas={self.replicas} (hsdp)"
            raise UserError(
                f"bit_exact=true: strategy.{option} divides the gradients in another order: leave it out, or take "
                "strategy=ddp"
            )
        if (self.policy.reduce_dtype or self.policy.param_dtype) in (torch.bfloat16, torch.float16):
            raise UserError(
                "bit_exact=true: FSDP adds gradients within a round in half precision, and rounds in full: set "
                "strategy.reduce_dtype=float32"
            )
        if str(self.precision_plugin.precision).endswith("16-true"):
            raise UserError(
                f"bit_exact=true: trainer.precision={self.precision_plugin.precision} has other bits under "
                "strategy=fsdp than under others: take strategy=ddp, or trainer.precision=bf16-mixed"
            )
        if count % world_size:
            raise UserError(
                f"bit_exact=true: {world_size} processes do not divide virtual_ranks={count}, as strategy=fsdp needs: "
                "use a number of trainer.devices that does, or strategy=ddp"
            )

    def make_mesh(self) -> DeviceMesh:
        self.check_world_size(self.world_size)
        shape, names = (self.replicas, self.world_size // self.replicas), ("replicate", "shard")
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self._shard_group = mesh["shard"].get_group()
        return mesh if self.replicas > 1 else mesh["shard"]

    def parallelize(self, module: L.LightningModule) -> None:
        """Shard each network of the module; each of its blocks is gathered on its own."""
        networks = list(_networks(module))
        uses = Counter(weight for net in networks for weight in net.parameters())
        for name, weight in module.named_parameters():
            if uses[weight] != 1:
                owner = "two networks" if uses[weight] else f"{type(module).__name__} itself"
                raise UserError(
                    f"strategy=fsdp gathers the weights of a network when it is called, but {name} belongs to {owner}: "
                    "move it into one network, or use strategy=ddp"
                )
        map_large_blocks()
        for net in networks:
            self._shard(net)
            make_root(cast(FSDPModule, net))
        record_layer_calls(
            {name: cast(nn.Module, part) for name, part in module.named_modules() if isinstance(part, FSDPModule)}
        )

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, LBFGS | torch.optim.Muon):
                raise UserError(
                    f"strategy=fsdp: {type(optimizer).__name__} of torch computes with whole matrices, of which a rank "
                    "has a shard: take optimizer=muon of this library for Muon, or strategy=ddp"
                )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Refuse weights that the network got while it trained, whose gradients no rank would average."""
        if not all(isinstance(weight, DTensor) for weight in weights_of(self.optimizers)):
            raise UserError(
                "strategy=fsdp shards the weights that the module has before training, and the optimizer has got "
                "others: add them in `configure_model`, or use strategy=ddp"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step of the module, whose loss must not read shards: a penalty would have the gradient of a shard."""
        try:
            output = super().training_step(*args, **kwargs)
        except (RuntimeError, AssertionError) as error:  # torch defines few operations for shards
            problem = next((text for words, text in _PROBLEMS.items() if words in str(error)), None)
            if not problem:
                raise
            raise UserError(f"strategy=fsdp: {problem}, or use strategy=ddp") from error
        if isinstance(output.get("loss") if isinstance(output, Mapping) else output, DTensor):
            raise UserError(f"strategy=fsdp: {_READS_SHARDS}, or use strategy=ddp")
        return output

    def _shard(self, net: nn.Module) -> None:
        options: dict[str, Any] = {"reshard_after_forward": self.reshard_after_forward, "mp_policy": self.policy}
        for module in self.gathered_modules(net):
            prepare_to_shard(module)
            is_norm = self.policy.param_dtype and isinstance(module, AnyBatchNorm)
            sharded = fully_shard(module, mesh=self.device_mesh, **({} if is_norm else options))
            if self.is_bit_exact:
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_custom_reduce_scatter(cast(Any, _TreeReduceScatter()))

    def gathered_modules(self, net: nn.Module) -> list[nn.Module]:
        """Return the modules that gather their weights at once, each without the weights of those before it."""
        # Batch statistics stay in full precision, so the weights of these layers must too: no policy.
        norms = [part for part in net.modules() if isinstance(part, AnyBatchNorm)] if self.policy.param_dtype else []
        # A block with tied weights, such as an embedding and the head, is gathered with the network.
        uses = _uses(net)
        blocks = [block for block in _networks(net) if all(uses[weight] == n for weight, n in _uses(block).items())]
        return [*norms, *blocks, net]


def _networks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module that have parameters and a forward pass; a list stands for its modules."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _networks(child)
        elif not isinstance(child, nn.ParameterList | nn.ParameterDict) and next(child.parameters(), None) is not None:
            yield child


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Return the number of names of each parameter; a tied one has several."""
    return Counter(weight for _, weight in module.named_parameters(remove_duplicate=False))


def _dtype(option: str, name: str | None) -> torch.dtype | None:
    found = getattr(torch, name, None) if name else None
    if name and not isinstance(found, torch.dtype):
        raise UserError(f"strategy.{option}={name} is no data type of torch: take bfloat16, float16 or float32")
    return found
