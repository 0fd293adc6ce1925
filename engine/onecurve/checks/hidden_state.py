"""A check for what a pass of a micro-batch or virtual rank changes, and no strategy adds over them."""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onecurve.errors import UserError
from onecurve.network.module_state import all_attributes
from onecurve.network.object_state import are_equal, is_same, leaves_of
from onecurve.network.tensors import to_local

_log = logging.getLogger(__name__)
_PROBLEM = (
    "changes in training_step, and each process or micro-batch would change it: write it in on_train_batch_end, once "
    "per step"
)
_ROUNDINGS = 16  # of the largest element of a weight, by which a second normalization may change it


class HiddenStateCheck:
    """Warns of attributes that a pass changes, and refuses changed weights: processes or micro-batches would differ.

    A trained weight may be written in each pass if a second pass changes nothing, as a constraint or a normalization
    does; with bit_exact=true only a mask may, as that of a causal convolution, because a second normalization rounds.
    If each process has one pass, `ReplicaCheck` finds masks that differ. What a library keeps outside of the module is
    not found. Weights that FSDP gathers for the pass have another shape: `GatheredWeightCheck` compares frozen ones.
    """

    def __init__(self, module: nn.Module, bit_exact: bool, named: set[str]) -> None:
        """Keep the state before a step; a warning adds to the `named` attributes."""
        self._module, self._bit_exact, self._named = module, bit_exact, named
        self._attributes = _hidden_attributes(module)
        self._frozen = _weights(module, are_trained=False)
        self._trained = _weights(module, are_trained=True) if bit_exact else {}

    def end_forward(self, number: int) -> None:
        """Compare with the state before, after the forward pass of a micro-batch or virtual rank of the step."""
        if number == 0:
            for name, *_ in self._changed(self._frozen):
                raise UserError(f"the frozen weight {name} {_PROBLEM}, or register it as a buffer with bit_exact=true")
            self._check_attributes()
        if number == 1 or (number == 0 and self._bit_exact):
            self._check_trained(number)
        # The backward pass needs the memory of the device.
        self._attributes, self._frozen, self._trained = {}, {}, {}
        if number == 0:
            self._trained = {name: weight.cpu() for name, weight in _weights(self._module, are_trained=True).items()}

    def _check_trained(self, number: int) -> None:
        for name, weight, before in self._changed(self._trained):
            is_first_mask = number == 0 and bool((weight[weight != before] == 0).all())
            if not (is_first_mask if self._bit_exact else _is_rounded(weight, before)):
                raise UserError(f"the trained weight {name} {_PROBLEM}")

    def _check_attributes(self) -> None:
        now = _hidden_attributes(self._module)
        changed = {name for name in now if not _are_same(now[name], self._attributes.get(name))} - self._named
        self._named |= changed
        if changed:
            _log.warning(
                "training_step changes %s: each process changes its own, so the run depends on their number if the "
                "loss reads it; register it as a buffer, and draw by the global generators of torch, NumPy and Python",
                ", ".join(sorted(changed)),
            )

    def _changed(self, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name and the values, now and before, of each weight that has others, in the same shape."""
        now = {name: to_local(weight.detach()) for name, weight in self._module.named_parameters()}
        for name in sorted(now.keys() & weights.keys()):  # one on all ranks
            before = weights[name].to(now[name].device)
            if before.shape == now[name].shape and not are_equal(now[name], before):
                yield name, now[name], before


def _weights(module: nn.Module, are_trained: bool) -> dict[str, Tensor]:
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad is are_trained}
    return {name: to_local(weight.detach()).clone() for name, weight in weights.items()}


def _is_rounded(weight: Tensor, before: Tensor) -> bool:
    largest = before.abs().max() * (_ROUNDINGS * torch.finfo(before.dtype).eps)
    return bool((weight - before).abs().max() <= largest)


def _hidden_attributes(module: nn.Module) -> dict[str, list[Any]]:
    """Return copies of the numbers, arrays and tensors that the attributes of the user's modules hold, by name."""
    return {name: _copies_of_leaves(value) for name, value in all_attributes(module).items()}


def _copies_of_leaves(value: Any) -> list[Any]:
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else copy.copy(leaf) for leaf in leaves_of(value)]


def _are_same(values: list[Any], before: list[Any] | None) -> bool:
    """Compare what an attribute holds: as of a list that a step appends to, its first values count, which are known."""
    if before is None:
        return not values
    return len(values) >= len(before) and all(map(is_same, values, before))
