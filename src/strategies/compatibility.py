"""What a strategy of Lightning's cannot do, said before it fails in its own words."""

from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from src.utils.errors import UserError


def check_can_train(strategy: Any, module: L.LightningModule) -> None:
    """Modules that step several optimisers by hand need whole replicas of themselves.

    Raises:
        UserError: if the strategy does not keep such.
    """
    if not module.automatic_optimization and not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        raise UserError(
            f"strategy={type(strategy).__name__} splits one network with one optimiser, but {type(module).__name__} "
            "steps several by hand: set strategy=ddp, or auto"
        )
