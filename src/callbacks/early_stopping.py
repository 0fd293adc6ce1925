"""Early stopping that a restart does not undo."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor


class ResumableEarlyStopping(EarlyStopping):
    """Lightning's EarlyStopping, with a decision that lasts: a stopped run that is started again stays stopped.

    Each validation counts once. The options come from the configuration, not from the checkpoint, so that a larger
    `patience` or another threshold makes a stopped run go on.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(check_on_train_epoch_end=False, **options)
        self._latest: Tensor | None = None  # the score of the last validation

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"latest": self._latest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})
        self._latest = state_dict.get("latest")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self._has_stopped()

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        self._latest = current
        return super()._evaluate_stopping_criteria(current)

    def _has_stopped(self) -> bool:
        """Whether the last validation ends the run, by today's options."""
        if self._latest is None:
            return False
        if self.wait_count >= self.patience or (self.check_finite and not torch.isfinite(self._latest)):
            return True
        if self.stopping_threshold is not None and self.monitor_op(self._latest, self.stopping_threshold):
            return True
        return self.divergence_threshold is not None and bool(
            self.monitor_op(-self._latest, -self.divergence_threshold)
        )
