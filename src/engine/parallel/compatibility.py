"""Check what a Lightning strategy supports, with a clear message before Lightning fails."""

from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from src.engine.utils.errors import UserError


def check_can_train(strategy: Any, module: L.LightningModule) -> None:
    """Check that the strategy can train the module: with manual optimization each rank needs a full replica."""
    name, module_name = type(strategy).__name__.removesuffix("Strategy").lower(), type(module).__name__
    if not module.automatic_optimization and not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        raise UserError(
            f"strategy={name} supports only one optimizer, but {module_name} optimizes manually, with several: set "
            "strategy=ddp, or auto"
        )
    for attribute, meaning in getattr(strategy, "module_needs", {}).items():
        if not getattr(module, attribute, None):
            raise UserError(
                f"strategy={name} needs {module_name}.{attribute}, {meaning}: add it, or use strategy=ddp or fsdp"
            )
    # FSDP makes new parameters, also of the stages of a pipeline, and pickling for spawned processes drops hooks.
    if "fsdp" in (name, getattr(strategy, "data_parallel", "")) or name == "ddpspawn":
        for weight_name, weight in module.named_parameters():
            if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                raise UserError(f"this strategy would lose the hook of the parameter {weight_name}: use strategy=ddp")
