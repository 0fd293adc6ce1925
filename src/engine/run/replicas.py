"""Checks that the ranks hold equal replicas, and that no micro-batch updates a buffer for itself."""

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from src.engine.determinism.seeding import are_equal
from src.engine.run.hidden_state import attributes
from src.engine.utils.errors import UserError
from src.engine.utils.steps import is_log_point

_log = logging.getLogger(__name__)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element


class ReplicaCheck(L.Callback):
    """Refuses ranks with different learning rates, buffers or frozen weights, and warns of different attributes.

    Ranks exchange hashes of them at the first step, at log points, before a checkpoint is written, and before a
    validation, whose forward pass lets DDP replace the buffers by those of rank zero.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if is_log_point(trainer, trainer.global_step):
            self._compare(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._compare(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._compare(trainer, pl_module)

    def _compare(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Compare the ranks. Every rank must call it; all come to the same result."""
        if trainer.world_size == 1:
            return
        found = {"rates": _rates(trainer), "state": _bits(_state(module)), "attributes": _bits(attributes(module))}
        own = [[_hash(sorted(values)), _hash(sorted(values.items()))] for values in found.values()]
        ranks = trainer.strategy.all_gather(torch.tensor(own, device=trainer.strategy.root_device))
        for kind, rows in zip(found, ranks.transpose(0, 1).tolist(), strict=True):
            # Ranks of a pipeline hold different stages: only those that have the same names are compared.
            if len({tuple(row) for row in rows}) > len({names for names, _ in rows}):
                self._report(kind, found[kind], trainer.datamodule.bit_exact)

    def _report(self, kind: str, own: dict[str, Any], is_bit_exact: bool) -> None:
        """Name what differs. Every rank must call it.

        Raises:
            UserError: if it is more than an attribute, which the loss may not read.
        """
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        values = {name: {rank[name] for rank in ranks if name in rank} for name in sorted(set().union(*ranks))}
        names = [name for name, different in values.items() if len(different) > 1]
        if kind == "rates":
            raise UserError(
                f"{names[0]} differs between the ranks ({', '.join(map(str, sorted(values[names[0]])))}): a scheduler "
                "or callback sets it from a value of its own rank; log that value with sync_dist=True"
            )
        way_out = "" if is_bit_exact else "register it as a buffer, if it is a weight, and set bit_exact=true; or "
        if kind == "state":
            raise UserError(
                f"{names[0]} differs between the ranks, each of which has changed it by samples of its own, so the run "
                f"would depend on their number: {way_out}reduce what changes it over the ranks (self.all_gather)"
            )
        if not self._has_warned:
            _log.warning(
                "%s differ(s) between the ranks: if the loss reads it, the run depends on their number; %sreduce it "
                "over the ranks",
                ", ".join(names),
                way_out,
            )
        self._has_warned = True


def _rates(trainer: L.Trainer) -> dict[str, float]:
    """Return the numbers of all parameter groups by name."""
    return {
        f"{key} of `{group['name']}` of optimizer {number}": float(value)
        for number, optimizer in enumerate(trainer.optimizers)
        for group in optimizer.param_groups
        for key, value in group.items()
        if isinstance(value, int | float | Tensor)
    }


def _state(module: L.LightningModule) -> dict[str, Tensor]:
    """Return what no strategy averages: buffers, but those of batch normalization, and frozen weights."""
    norms = tuple(f"{name}." for name, layer in module.named_modules() if isinstance(layer, _BatchNorm))
    weights = {name: weight for name, weight in module.named_parameters() if not weight.requires_grad}
    return weights | {name: buffer for name, buffer in module.named_buffers() if not name.startswith(norms)}


def _bits(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sum of the bits of each tensor, which needs no memory, and other values unchanged; leave shards out."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    whole = {name: tensor.detach().flatten() for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    sums = [flat.view(_INTEGERS.get(flat.element_size(), torch.int64)).sum() for flat in whole.values()]
    device = sums[0].device if sums else None
    hashes = torch.stack([one.to(device) for one in sums]).tolist() if sums else []  # the host waits for a GPU once
    others = {name: value for name, value in values.items() if name not in tensors}
    return others | dict(zip(whole, hashes, strict=True))


def _hash(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), signed=True)


class BufferCheck(L.Callback):
    """Refuses a network that updates a buffer for each micro-batch, by a comparison in the first step of a run.

    `src/engine/parallel/batch_norm.py` takes care of batch normalization.
    """

    def __init__(self) -> None:
        self._before: dict[str, Tensor] | None = None
        self._is_due = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_due = trainer.datamodule.layout.micro_batches > 1

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due and self._before is None:
            self._before = {name: buffer.clone() for name, buffer in _divided_buffers(trainer, pl_module).items()}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if not self._is_due:
            return
        self._is_due, before = False, self._before or {}
        now = _divided_buffers(trainer, pl_module)  # with those that the network has made in its first pass
        changed = [name for name in before if not are_equal(now[name], before[name])]
        ranks: list[Any] = [changed]
        if dist.is_initialized():  # all must stop, also the ranks of a pipeline that do not have the buffer
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, changed)
        for name in sorted(set().union(*ranks)):
            raise UserError(
                f"the forward pass updates {name} once for each micro-batch, so the run would depend on their number: "
                "set bit_exact=true, or trainer.accumulate_grad_batches=1 and another strategy than a pipeline"
            )


def _divided_buffers(trainer: L.Trainer, module: Any) -> dict[str, Tensor]:
    """Return the buffers of what each micro-batch calls, which in a pipeline is the network."""
    part = module.net if trainer.datamodule.parallel.num_microbatches > 1 else module
    return {name: tensor for name, tensor in _state(part).items() if not isinstance(tensor, nn.Parameter)}
