"""Portable checkpoints: full tensors by parameter name, independent of what each rank holds in memory."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim import Optimizer

from src.engine.observe.recording import communication
from src.engine.state import sharded
from src.engine.state.integrity import corruption_error, read_checkpoint
from src.engine.state.io import write_error
from src.engine.state.optimizer_state import merge, shard, shard_like
from src.engine.utils.tensors import to_full_tensor, with_versions

# In these methods FSDP2 gathers the weights of a block, or reduces its gradients.
for _name in ("pre_forward", "pre_backward", "post_backward"):
    setattr(FSDPParamGroup, _name, communication()(getattr(FSDPParamGroup, _name)))


class ShardedStateStrategy(ModelParallelStrategy):
    """A strategy that writes and reads the checkpoint of a single process, although each rank holds a part.

    It restores the weights before the network is sharded or split, and the optimizer state, by parameter name,
    afterwards. Any strategy can therefore read a checkpoint of any other.

    Args:
        sharded_checkpoints: each rank writes its part into a folder beside the checkpoint file
            (`src/engine/state/sharded.py`). Otherwise rank zero gathers and writes all tensors.
        shares: relative numbers of samples of the data-parallel ranks, for devices of unequal speed; null means equal
            ones.
        **kwargs: arguments of ModelParallelStrategy.
    """

    def __init__(self, sharded_checkpoints: bool = False, shares: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(save_distributed_checkpoint=False, **kwargs)
        self.sharded_checkpoints, self.shares = sharded_checkpoints, shares
        self._full_names: list[str] = []  # all tensors of the full network, in order; empty until it is parallelized
        self._versions: dict[str, Any] = {}  # an empty state dict with the versions of the modules of the full network

    @abstractmethod
    def parallelize(self, module: L.LightningModule) -> None:
        """Shard or split the network of the module, in place; parameter names do not change."""

    @property
    def owns_state(self) -> bool:
        """Whether this rank contributes its state to a checkpoint; other ranks hold the same state."""
        return self.is_global_zero

    def gather_state(self, own: Any) -> list[Any]:
        """Return the states of all ranks that own state, on rank zero; elsewhere an empty list.

        Every rank that owns state must call it.
        """
        return [own] if self.owns_state else []

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def setup(self, trainer: L.Trainer) -> None:
        Strategy.setup(self, trainer)  # skips ModelParallelStrategy.setup, which requires `configure_model`

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if not self._full_names:  # test after fit finds the network parallelized already
            full = model.state_dict()
            self._full_names, self._versions = list(full), with_versions({}, full)
            assert self.lightning_module is not None
            self.parallelize(self.lightning_module)
        return model

    reduce = communication()(ModelParallelStrategy.reduce)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        if self.sharded_checkpoints:
            return own
        return self._merge_ranks(self._to_full_tensors(own))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()
        if self.sharded_checkpoints:
            return state
        moments = {number: self._to_full_tensors(values) for number, values in state["state"].items()}
        return merge(self.gather_state(state | {"state": moments}), self._full_names)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.sharded_checkpoints:
            folder = self.broadcast(sharded.new_folder(Path(filepath)))
            try:
                sharded.save_shards(checkpoint, folder)
            except OSError as error:  # every rank gets the error of the rank that failed
                raise write_error(Path(filepath), error) from error
            checkpoint = self._without_tensors(checkpoint) | {sharded.SHARDS: folder.name}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _without_tensors(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint of the full network with meta tensors, on rank zero. Every rank must call it."""
        own = sharded.map_tensors(
            checkpoint, lambda _, tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        )
        for section in sharded.WEIGHTS:
            if section in own:
                own[section] = self._merge_ranks(own[section])
        if "optimizer_states" in own:
            own["optimizer_states"] = [
                merge(self.gather_state(state), self._full_names) for state in own["optimizer_states"]
            ]
        return own

    def _to_full_tensors(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Gather full tensors into CPU memory, one at a time; return none on ranks that own no state."""
        full_tensors = {}
        for name, value in tensors.items():
            full = to_full_tensor(value)  # a collective
            if self.owns_state:
                full_tensors[name] = full.cpu() if isinstance(full, Tensor) else full
        return full_tensors

    def _merge_ranks(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Merge the tensors of all ranks, in the order of the full network, on rank zero; elsewhere return none."""
        merged: dict[str, Tensor] = {}
        for part in self.gather_state(own):
            merged |= part
        ordered = {name: merged[name] for name in self._full_names} if self.is_global_zero else {}
        return with_versions(ordered, self._versions)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._checkpoint_path = Path(checkpoint_path)
        checkpoint = read_checkpoint(checkpoint_path, moments=False)
        if self._full_names:  # the network is parallelized already, as for predict after test
            checkpoint["state_dict"] = self._shard_weights(checkpoint["state_dict"])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(self._shard_weights(checkpoint["state_dict"]), strict=strict)

    def _shard_weights(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of the full tensors that this rank holds."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        parts = {name: shard_like(saved[name], tensor) for name, tensor in own.items() if name in saved}
        return with_versions(parts, saved)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        saved = zip(checkpoint["optimizer_states"], self.optimizers, strict=True)
        states = [shard(state, optimizer) for state, optimizer in saved]
        if sharded.SHARDS in checkpoint:
            try:
                sharded.load_shards({"optimizer_states": states}, self._checkpoint_path, dict(checkpoint))
            except Exception as error:  # a corrupt file can raise any exception
                raise corruption_error(self._checkpoint_path, error) from error
        for state, optimizer in zip(states, self.optimizers, strict=True):
            optimizer.load_state_dict(state)
