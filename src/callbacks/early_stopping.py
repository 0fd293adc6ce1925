"""Early stopping that a restart does not undo."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor


class ResumableEarlyStopping(EarlyStopping):
    """Lightning's EarlyStopping with a permanent decision: a stopped run stays stopped when it is started again.

    Each validation counts once. The options come from the configuration, not from the checkpoint, so that a stopped run
    continues with a larger `patience` or another threshold.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(check_on_train_epoch_end=False, **options)
        self._latest_score: Tensor | None = None  # of the last validation
        self._stopped_with: dict[str, Any] | None = None  # options with which a validation stopped the run

    @property
    def _options(self) -> dict[str, Any]:
        names = ("patience", "min_delta", "check_finite", "stopping_threshold", "divergence_threshold")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"latest": self._latest_score, "stopped_with": self._stopped_with}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})
        self._latest_score, self._stopped_with = state_dict.get("latest"), state_dict.get("stopped_with")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop a run that its last validation has already stopped, even if `min_epochs` postponed the end."""
        trainer.should_stop = trainer.should_stop or self._stopped_with == self._options or self._meets_criterion()

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        self._latest_score = current
        should_stop, reason = super()._evaluate_stopping_criteria(current)
        if should_stop:
            self._stopped_with = self._options
        return should_stop, reason

    def _meets_criterion(self) -> bool:
        """Return whether the last validation stops the run with the present options."""
        score = self._latest_score
        if score is None:
            return False
        if self.wait_count >= self.patience or (self.check_finite and not torch.isfinite(score)):
            return True
        if self.stopping_threshold is not None and self.monitor_op(score, self.stopping_threshold):
            return True
        return self.divergence_threshold is not None and bool(self.monitor_op(-score, -self.divergence_threshold))
