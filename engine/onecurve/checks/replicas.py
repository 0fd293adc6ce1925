"""Checks that the ranks hold equal replicas, and that no rank or micro-batch updates a buffer or weight for itself."""

import hashlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from onecurve.checkpoint.optimizer_state import group_name
from onecurve.errors import UserError
from onecurve.network.module_state import attributes
from onecurve.network.net import network_of
from onecurve.network.object_state import are_equal, is_dense
from onecurve.network.tensors import to_local
from onecurve.observe.steps import is_log_point, trained_steps
from onecurve.patches.torch import AnyBatchNorm, is_compiled
from onecurve.process.gather import gather_objects, names_that_differ

_log = logging.getLogger(__name__)
_WAYS_OUT = {
    "rate": "Log with sync_dist=True what a scheduler or callback reads",
    "state": "Register it as a buffer and set bit_exact=true, or reduce what changes it over the ranks (all_gather)",
    "bit_exact": "Change a buffer in training_step, or give all ranks that of rank zero (trainer.strategy.broadcast)",
}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element


class ReplicaCheck(L.Callback):
    """Refuses ranks with different learning rates, buffers or frozen weights, and warns of different attributes.

    They compare trained weights as well: as a run begins, before a strategy shards or splits them, in which they differ
    if a script builds its module before the trainer; and the first time in a run, also one that goes on, as a layer may
    take their first values from its samples, and a step may write their gradients. Ranks exchange hashes at the first
    step, at log points, before a checkpoint is written, and before a validation, whose forward pass lets DDP replace
    the buffers by those of rank zero.
    """

    _seen: L.LightningModule | None = None  # which a strategy may have sharded or split since
    _has_warned = _is_first = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        is_new, self._seen = self._seen is not pl_module, pl_module
        if stage == "fit" and is_new and names_that_differ(_summaries(dict(pl_module.named_parameters()))):
            raise UserError(
                "the ranks begin with different weights: build the module after the trainer, which seeds the "
                "generators, or call lightning.seed_everything first"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_first = not (trainer.distributed_sampler_kwargs or {}).get("has_own_weights", False)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if is_log_point(trainer, trained_steps(trainer)):
            self._compare(trainer, pl_module)

    def _compare(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        """Compare the ranks, which must all call it.

        Raises:
            UserError: on all ranks, if more than an attribute differs, which the loss may not read.
        """
        if trainer.world_size == 1:
            return
        known = {} if self._has_warned else _summaries(attributes(pl_module))
        state = _untrained_weights(trainer, pl_module) | _buffers(pl_module)
        if self._is_first and trainer.training:
            self._is_first, state = False, state | dict(pl_module.named_parameters())
        kinds = {"rate": _rates(trainer), "state": _summaries(state), "attribute": known}
        own = {f"{kind}: {name}": value for kind, values in kinds.items() for name, value in sorted(values.items())}
        if len(set(gather_objects(hashlib.blake2b(repr(own).encode()).digest()))) == 1:
            return
        # Ranks of a pipeline, which hold different stages, compare what they have in common.
        differing = [name.split(": ", maxsplit=1) for name in names_that_differ(own)]
        of_state = _WAYS_OUT["bit_exact" if trainer.datamodule.bit_exact else "state"]
        for kind, name in differing:
            if kind != "attribute":
                raise UserError(
                    f"{name} differs between the ranks: each has changed it by samples or metrics of its own. "
                    f"{of_state if kind == 'state' else _WAYS_OUT[kind]}"
                )
        if differing:
            self._has_warned = True
            _log.warning(
                "the ranks have different %s: if the loss reads it, the run depends on their number. %s",
                ", ".join(name for _, name in differing),
                of_state,
            )

    on_validation_start = on_save_checkpoint = _compare


def _rates(trainer: L.Trainer) -> dict[str, float]:
    """Return the numbers of all parameter groups by name."""
    return {
        f"{key} of `{group_name(group)}` of optimizer {number}": float(value)
        for number, optimizer in enumerate(trainer.optimizers)
        for group in optimizer.param_groups
        for key, value in group.items()
        if isinstance(value, int | float | Tensor)
    }


def _untrained_weights(trainer: L.Trainer, module: nn.Module) -> dict[str, Tensor]:
    """Return frozen weights, and those of no optimizer of the run: a callback may train a classifier on features."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    trained = {id(weight) for group in groups for weight in group["params"] if weight.requires_grad}
    return {name: weight for name, weight in module.named_parameters() if id(weight) not in trained}


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers, but those of batch normalization."""
    norms = tuple(f"{name}." for name, layer in module.named_modules() if isinstance(layer, AnyBatchNorm))
    return {name: buffer for name, buffer in module.named_buffers() if not name.startswith(norms)}


def _summaries(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: summary(value) for name, value in values.items()}


def summary(value: Any) -> Any:
    """Return what tells a number, an array or a tensor from others, without its memory; of a shard, the shape alone."""
    if isinstance(value, np.ndarray):
        return hashlib.blake2b(value.tobytes()).hexdigest()
    if is_lazy(value):
        return None
    if isinstance(value, Tensor):
        is_whole = is_dense(value) and not isinstance(value, DTensor)
        return (*value.shape, int(_sum_of_bits(value)) if is_whole else None)
    return value


def _sum_of_bits(tensor: Tensor) -> Tensor:
    flat = to_local(tensor.detach()).flatten()
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int64)).sum()


class GatheredWeightCheck(L.Callback):
    """Refuses a layer whose forward pass writes into a weight that FSDP has gathered, which it frees afterwards.

    It compares sums of the bits of the weights before and after each forward pass of the first step of a run. A network
    with compiled layers is not checked: hooks would divide its graph, and without them it would be compiled again.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_due, self._handles = True, list[Any]()
        self._before: dict[str, Tensor] = {}
        self._sums: list[tuple[str, Tensor, Tensor]] = []  # of each weight in each pass, which the host reads at once
        for prefix, part in [] if is_compiled(pl_module) else pl_module.named_modules():
            names = [name for name, weight in part.named_parameters(recurse=False) if isinstance(weight, DTensor)]
            if names:
                self._handles.append(part.register_forward_pre_hook(partial(self._keep, prefix, names)))
                # Before the hook in which FSDP frees the weights.
                self._handles.append(part.register_forward_hook(partial(self._compare, prefix, names), prepend=True))

    def _keep(self, prefix: str, names: list[str], part: nn.Module, *_: Any) -> None:
        self._before |= {f"{prefix}.{name}": _sum_of_bits(getattr(part, name)) for name in names}

    def _compare(self, prefix: str, names: list[str], part: nn.Module, *_: Any) -> None:
        for name in names:
            weight, path = getattr(part, name), f"{prefix}.{name}"
            text = f"{'trained' if weight.requires_grad else 'frozen'} weight {path}"
            self._sums.append((text, self._before[path], _sum_of_bits(weight)))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not self._is_due or not is_log_point(trainer, trained_steps(trainer)):  # elsewhere the host need not wait
            return
        self._is_due = False
        sums = torch.stack([torch.stack(pair) for _, *pair in self._sums]).cpu().tolist() if self._sums else []
        own = {name for (name, *_), (before, after) in zip(self._sums, sums, strict=True) if before != after}
        # Also of ranks whose stage of a pipeline has no such weight.
        for name in sorted(set().union(*gather_objects(own))):
            raise UserError(
                f"the forward pass writes into the {name}, which strategy=fsdp gathers for it and then frees, so that "
                "the new value is lost: register it as a buffer, or give it its first value before the run"
            )


class BufferCheck(L.Callback):
    """Refuses a network that updates a buffer for each micro-batch, by a comparison in the first step of a run.

    `onecurve/parallel/batch_norm.py` takes care of batch normalization.
    """

    _is_due = False  # a search for the learning rate takes steps before training starts

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_due = trainer.datamodule.layout.micro_batches > 1
        self._before: dict[str, Tensor] = {}

    def begin_step(self, trainer: L.Trainer) -> None:
        """Copy the buffers, after the hooks at the start of the step, which may change some once."""
        if self._is_due:
            buffers = _divided_buffers(trainer, trainer.lightning_module)
            self._before = {name: buffer.clone() for name, buffer in buffers.items()}

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Compare after all passes, and before the module's own hook."""
        if not self._is_due:
            return
        self._is_due = False
        now = _divided_buffers(trainer, pl_module)  # with those that the network has made in its first pass
        changed = [name for name, before in self._before.items() if not are_equal(now[name], before)]
        # All must stop, also the ranks of a pipeline that do not have the buffer.
        for name in sorted(set().union(*gather_objects(changed))):
            raise UserError(
                f"the forward pass updates {name} once for each micro-batch, so the run would depend on their number: "
                "set bit_exact=true, or trainer.accumulate_grad_batches=1 and another strategy than a pipeline"
            )


def _divided_buffers(trainer: L.Trainer, module: Any) -> dict[str, Tensor]:
    """Return the buffers of what each micro-batch calls, which in a pipeline is the network."""
    return _buffers(network_of(module) if trainer.datamodule.parallel.num_microbatches > 1 else module)
