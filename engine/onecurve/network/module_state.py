"""What a module has in memory, its attributes and hooks; computing in another mode, and without logs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from onecurve.patches.torch import AUTOCAST_FLAG, COMPILER_MARK

_OPTIONS = ("p", "momentum", "eps")  # of layers of torch
_OTHERS = {*vars(L.LightningModule()), AUTOCAST_FLAG}  # attributes of any module


def all_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of the user's modules by name, metrics and layers of this library left out."""
    found = {}
    for name, part in module.named_modules():
        # FSDP makes a class of each.
        kind = next(one for one in type(part).__mro__ if not one.__module__.startswith("torch.distributed.fsdp"))
        is_own = kind.__module__.startswith("onecurve.")  # a layer of torch that is another kind here
        weights = [key for key, _ in part.named_parameters(recurse=False)]
        # `weight` of `weight_v`, as by weight_norm, and of `weight_orig`, as by spectral_norm and pruning
        computed = {key.rpartition("_")[0] for key in weights if key.endswith(("_v", "_orig"))}
        for key, value in {} if isinstance(part, Metric | MetricCollection) else vars(part).items():
            of_torch = key in _OTHERS or key in computed or key.startswith(COMPILER_MARK)
            if not of_torch and (not is_own or key in _OPTIONS):
                found[f"{name}.{key}".lstrip(".")] = value
    return found


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and tensors that are attributes of the user's modules, by name."""
    found = all_attributes(module)
    return {name: value for name, value in found.items() if isinstance(value, int | float | Tensor)}


def with_own_hook(trainer: Any, hook: str) -> list[Any]:
    """Return the module and the callbacks that have a hook of the user's, not of Lightning nor of this library."""
    own = [one for one in trainer.callbacks if not type(one).__module__.startswith(("onecurve.", "lightning."))]
    return [one for one in (trainer.lightning_module, *own) if is_overridden(hook, one)]


def call_step(module: L.LightningModule, name: str, batch: Any, batch_idx: int, *loader: int) -> Any:
    """Call a step of the module as Lightning does: without `batch_idx`, if it does not take it."""
    step = getattr(module, name)
    takes_number = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    return step(batch, *([batch_idx] if takes_number else []), *loader)


def plain_callbacks(trainer: L.Trainer) -> dict[str, L.Callback]:
    """Return the user's callbacks that have no state of their own; of a class with several, none."""
    callbacks: list[L.Callback] = cast(Any, trainer).callbacks
    plain = [one for one in callbacks if type(one).state_dict is L.Callback.state_dict]
    # Not one that inherits from a callback of Lightning, as a progress bar, which has numbers of its process.
    own = [one for one in plain if _bases(one) == [L.Callback]]
    classes = [type(one) for one in own]
    return {f"callback {one.state_key}": one for one in own if classes.count(type(one)) == 1}


def _bases(callback: L.Callback) -> list[type]:
    """Return the classes of Lightning and of this library that a callback inherits from, its own among them."""
    return [part for part in type(callback).__mro__ if part.__module__.startswith(("lightning.", "onecurve."))]


@contextmanager
def set_mode(net: nn.Module, training: bool) -> Iterator[None]:
    """Set the mode of all modules, and restore each module's own mode."""
    before = {module: module.training for module in net.modules()}
    net.train(training)
    try:
        yield
    finally:
        for module, was_training in before.items():
            module.training = was_training


def without_log(module: L.LightningModule) -> Any:
    """Return a context in which the module can log although no trainer's loop runs; `log_dict` calls `log`, a mock."""
    return mock.patch.object(module, "log")
