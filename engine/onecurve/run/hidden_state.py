"""A check for what a pass of a micro-batch or virtual rank changes, and no strategy adds over them."""

import logging
from typing import Any

import lightning as L
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from onecurve.errors import UserError
from onecurve.network.tensors import to_local
from onecurve.random.seeding import are_equal

_log = logging.getLogger(__name__)
_LIGHTNINGS = vars(L.LightningModule()).keys()  # attributes of any module


def hidden_state(module: nn.Module) -> dict[str, Any]:
    """Return, by name, copies of what a pass could change and no other process would see.

    It is neither trained nor a buffer: frozen weights, and numbers and tensors that are attributes. Lists and what a
    library keeps outside of the module are not found.
    """
    weights = module.named_parameters()
    state: dict[str, Any] = {name: to_local(weight) for name, weight in weights if not weight.requires_grad}
    state |= attributes(module)
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def check_hidden_state(module: nn.Module, before: dict[str, Any]) -> None:
    """Warn of attributes that differ from those before a pass; refuse changed frozen weights: replicas would differ.

    Frozen weights that FSDP gathers for the pass have another shape: `GatheredWeightCheck` compares them.
    """
    now, weights = hidden_state(module), dict(module.named_parameters())
    gathered = {name for name in weights.keys() & now.keys() & before.keys() if now[name].shape != before[name].shape}
    changed = sorted(name for name in now.keys() - gathered if not _is_same(now[name], before.get(name)))
    for name in changed:
        if name in weights:
            raise UserError(
                f"the frozen weight {name} changes in training_step, and each process or micro-batch would change it: "
                "register it as a buffer, of which all virtual ranks get the mean with bit_exact=true"
            )
    if changed:
        _log.warning(
            "training_step changes %s: each process changes its own, so if the loss reads it, the run depends on their "
            "number; register it as a buffer, of which all virtual ranks get the mean",
            ", ".join(changed),
        )


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and tensors that are attributes of the user's modules, by name."""
    found = {}
    for name, part in module.named_modules():
        is_known = isinstance(part, Metric | MetricCollection) or type(part).__module__.startswith("onecurve.")
        for key, value in {} if is_known else vars(part).items():
            if isinstance(value, int | float | Tensor) and key not in _LIGHTNINGS:
                found[f"{name}.{key}".lstrip(".")] = value
    return found


def _is_same(value: Any, before: Any) -> bool:
    if isinstance(value, Tensor):
        return are_equal(value, before)
    return value == before or (value != value and before != before)  # NaN is equal to NaN
