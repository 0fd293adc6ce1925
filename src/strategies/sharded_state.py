"""Checkpoints that travel: whole tensors by the names of their parameters, whatever a rank holds in memory."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from src.checkpoint import sharded
from src.checkpoint.integrity import corruption_error, read_checkpoint
from src.checkpoint.io import write_error
from src.optim.optimizer_state import merge, shard, shard_like, to_full_tensor


class ShardedStateStrategy(ModelParallelStrategy):
    """Restores a checkpoint before the network is taken apart, and its optimiser's state, by name, after.

    So a checkpoint is that of a single process, whichever strategy wrote it, and any reads it.

    Args:
        sharded_checkpoints: each rank writes what it holds, into a folder beside the checkpoint
            (`src/checkpoint/sharded.py`), instead of all of it going through the memory of the first.
    """

    def __init__(self, sharded_checkpoints: bool = False, **kwargs: Any) -> None:
        super().__init__(save_distributed_checkpoint=False, **kwargs)
        self.sharded_checkpoints = sharded_checkpoints
        self._names: list[str] = []  # of the whole network's tensors, in order, once it is distributed

    @abstractmethod
    def parallelize(self, module: L.LightningModule) -> None:
        """Leave each rank its part of the module's network, under the names of the whole one."""

    @property
    def owns_state(self) -> bool:
        """Whether what this rank has goes into a checkpoint: others have the same."""
        return self.is_global_zero

    def gather_state(self, own: Any) -> list[Any]:
        """On rank zero, what the ranks have who contribute. All of these must take part."""
        return [own] if self.owns_state else []

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def setup(self, trainer: L.Trainer) -> None:
        Strategy.setup(self, trainer)  # Lightning's own wants a module that parallelises itself

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if not self._names:  # after fit, test finds it distributed
            self._names = list(model.state_dict())
            if self._layer_sync:
                self._layer_sync.apply(model)
            assert self.lightning_module is not None
            self.parallelize(self.lightning_module)
        return model

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        if self.sharded_checkpoints:
            return own
        return self._joined(self._gathered(own))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()
        if self.sharded_checkpoints:
            return state
        moments = {number: self._gathered(values) for number, values in state["state"].items()}
        return merge(self.gather_state(state | {"state": moments}), self._names)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.sharded_checkpoints:
            folder = self.broadcast(sharded.new_folder(Path(filepath)))
            try:
                sharded.save_shards(checkpoint, folder)
            except OSError as error:  # on all ranks, whichever it happened to
                raise write_error(Path(filepath), error) from error
            checkpoint = self._without_tensors(checkpoint) | {sharded.SHARDS: folder.name}
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            sharded.remove_unused_folders(Path(filepath))

    def _without_tensors(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The whole network's, on rank zero. Every rank must take part."""
        own = sharded.map_tensors(
            checkpoint, lambda _, tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        )
        for section in sharded.WEIGHTS:
            if section in own:
                own[section] = self._joined(own[section])
        if "optimizer_states" in own:
            own["optimizer_states"] = [
                merge(self.gather_state(state), self._names) for state in own["optimizer_states"]
            ]
        return own

    def _gathered(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Whole ones in the CPU's memory, one after the other; none where they do not contribute."""
        wholes = {}
        for name, value in tensors.items():
            together = to_full_tensor(value)
            if self.owns_state:
                wholes[name] = together.cpu() if isinstance(together, Tensor) else together
        return wholes

    def _joined(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        every = {name: tensor for part in self.gather_state(own) for name, tensor in part.items()}
        return {name: every[name] for name in self._names} if self.is_global_zero else {}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._read_from = Path(checkpoint_path)
        checkpoint = read_checkpoint(checkpoint_path, moments=False)
        if self._names:  # a second look, as predict after test takes: at what this rank holds
            checkpoint["state_dict"] = self._parts(checkpoint["state_dict"])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(self._parts(checkpoint["state_dict"]), strict=strict)

    def _parts(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of a whole network's tensors, what this rank holds."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        return {name: shard_like(saved[name], tensor) for name, tensor in own.items() if name in saved}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        saved = zip(checkpoint["optimizer_states"], self.optimizers, strict=True)
        states = [shard(state, optimizer) for state, optimizer in saved]
        if sharded.SHARDS in checkpoint:
            try:
                sharded.load_shards({"optimizer_states": states}, self._read_from, dict(checkpoint))
            except Exception as error:  # as a corrupt file can raise anything
                raise corruption_error(self._read_from, error) from error
        for state, optimizer in zip(states, self.optimizers, strict=True):
            optimizer.load_state_dict(state)
