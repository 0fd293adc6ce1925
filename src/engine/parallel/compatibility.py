"""Check what a Lightning strategy supports, with a clear message before Lightning fails."""

from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from src.engine.utils.errors import UserError


def check_can_train(strategy: Any, module: L.LightningModule) -> None:
    """Check that the strategy can train the module: with manual optimization each rank needs a full replica.

    Raises:
        UserError: if the module uses manual optimization and the strategy keeps no full replicas, or the module lacks
            an attribute that the strategy needs, such as `loss`.
    """
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
