"""Portable checkpoints: full tensors by parameter name, independent of what each rank holds in memory."""

from abc import abstractmethod
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import lightning as L
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from onecurve.checkpoint import sharded
from onecurve.checkpoint.format import BY_WEIGHT, MERGED, STATES
from onecurve.checkpoint.io import write_error
from onecurve.checkpoint.optimizer_state import merge, name_parameters, shard_like
from onecurve.network.tensors import to_full_tensor, with_versions
from onecurve.observe.step_times import timed_communication
from onecurve.patches.fsdp import let_data_write_shards, let_numbers_be_of_all_shards
from onecurve.patches.lightning_strategies import ModelParallelStrategy
from onecurve.process.gather import all_gather

divided_by = WeakKeyDictionary[nn.Module, Any]()  # the layers of which a rank has a part, with the strategy of each


def prepare_to_shard(part: nn.Module) -> None:
    """Make the weights that FSDP2 is to gather at once contiguous."""
    let_data_write_shards()
    let_numbers_be_of_all_shards()
    for weight in part.parameters():
        if not isinstance(weight, DTensor):
            weight.data = weight.data.contiguous()  # FSDP2 supports neither channels last nor a transposed matrix


class ShardedStateStrategy(ModelParallelStrategy):
    """A strategy that writes and reads the checkpoint of a single process, although each rank holds a part.

    It restores the weights before the network is sharded or split; afterwards `ExactResumption` restores the optimizer
    state, by parameter name. Any strategy can therefore read a checkpoint of any other. `on_save_checkpoint` sees the
    rank's own part; `save_checkpoint` merges the parts.

    Args:
        sharded_checkpoints: each rank writes its part into a folder beside the checkpoint file
            (`onecurve/checkpoint/sharded.py`). Otherwise rank zero gathers and writes all tensors.
        shares: relative numbers of samples of the data-parallel ranks, for devices of unequal speed; null means equal
            ones.
        **kwargs: arguments of ModelParallelStrategy.
    """

    hardware_options: Sequence[str] = ("sharded_checkpoints", "shares")  # they change no curve

    def __init__(self, sharded_checkpoints: bool = False, shares: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(save_distributed_checkpoint=False, **kwargs)
        self.sharded_checkpoints, self.shares = sharded_checkpoints, shares
        # The names of all tensors of the full network, in order, with the versions of its modules; empty until it is
        # parallelized.
        self._full: Mapping[str, None] = {}

    # Those of ModelParallelStrategy require `configure_model`, and number the parameters as the rank holds them.
    setup = Strategy.setup
    lightning_module_state_dict = Strategy.lightning_module_state_dict
    load_optimizer_state_dict = Strategy.load_optimizer_state_dict  # the optimizer takes its shards: `restore_by_name`
    restore_checkpoint_after_setup = Strategy.restore_checkpoint_after_setup
    lightning_restore_optimizer = Strategy.lightning_restore_optimizer
    reduce = timed_communication()(ModelParallelStrategy.reduce)
    all_gather = timed_communication()(all_gather)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if "param_names" not in optimizer.param_groups[0]:  # a hook has put it in the place of the module's own
            name_parameters(optimizer, cast(L.LightningModule, self.lightning_module))
        return Strategy.optimizer_state(self, optimizer)

    @abstractmethod
    def parallelize(self, module: L.LightningModule) -> None:
        """Shard or split the network of the module, in place; parameter names do not change."""

    @property
    def is_bit_exact(self) -> bool:
        """Whether the run computes its virtual ranks one by one."""
        return cast(Any, self.lightning_module).trainer.datamodule.bit_exact

    @property
    def owns_state(self) -> bool:
        """Whether this rank contributes its state to a checkpoint; other ranks hold the same state."""
        return self.is_global_zero

    def gather_state(self, own: Any) -> list[Any]:
        """Return the states of all ranks that own state, on rank zero; elsewhere an empty list.

        Every rank that owns state must call it.
        """
        return [own] if self.owns_state else []

    def model_to_device(self) -> None:
        """Move the module, and parallelize it before the optimizers get its weights."""
        super().model_to_device()
        if not self._full:  # test after fit finds the network parallelized already
            module = cast(L.LightningModule, self.lightning_module)
            full = module.state_dict()
            self._full = with_versions(dict.fromkeys(full), full)
            self.parallelize(module)
            divided_by.update(dict.fromkeys(module.modules(), ref(self)))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.sharded_checkpoints:
            folder = self.broadcast(sharded.new_folder(Path(filepath)))
            try:
                checkpoint = sharded.save_shards(checkpoint, folder)
            except OSError as error:  # every rank gets the error of the rank that failed
                raise write_error(Path(filepath), error) from error
        else:
            checkpoint = sharded.map_tensors(checkpoint, self._to_full_tensor)
        super().save_checkpoint(self._merge_ranks(checkpoint), filepath, storage_options)

    def _to_full_tensor(self, tensor: Tensor) -> Tensor | None:
        """Gather a tensor into CPU memory (a collective); return none on ranks that own no state."""
        full = to_full_tensor(tensor)
        return full.cpu() if self.owns_state else None

    def _merge_ranks(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint of the full network, on rank zero; every rank must call it."""
        merged = dict(checkpoint)
        for key, kind in MERGED.items():  # on every rank in the same order
            if key in checkpoint and kind == BY_WEIGHT:
                merged[key] = with_versions(self._gather_by_name(checkpoint[key]), self._full)
            elif key in checkpoint and kind == STATES:
                merged[key] = [merge(self.gather_state(state), list(self._full)) for state in checkpoint[key]]
            elif key in checkpoint:
                merged[key] = dict(ChainMap(*self.gather_state(checkpoint[key])))
        return merged

    def _gather_by_name(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all ranks in the order of the full network, and last what a callback has added."""
        values = {name: value for part in self.gather_state(own) for name, value in part.items()}
        in_order = [name for name in self._full if name in values]
        return {name: values[name] for name in in_order} | values

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = Strategy.load_checkpoint(self, checkpoint_path, weights_only)  # all tensors
        if self._full:  # the network is parallelized already, as for predict after test
            checkpoint["state_dict"] = self._shard_weights(checkpoint["state_dict"])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.lightning_module.load_state_dict(self._shard_weights(checkpoint["state_dict"]), strict=strict)

    def _shard_weights(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of the full tensors that this rank holds."""
        own = self.lightning_module.state_dict()
        parts = {name: shard_like(saved[name], tensor) for name, tensor in own.items() if name in saved}
        return with_versions(parts, saved)
