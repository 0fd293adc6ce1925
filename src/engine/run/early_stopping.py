"""Early stopping that a restart does not undo."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor


class ResumableEarlyStopping(EarlyStopping):
    """Lightning's EarlyStopping with a permanent decision: a stopped run stays stopped when it is started again.

    Each validation counts once. The options come from the configuration, not from the checkpoint. If one has changed, a
    stopped run continues, and the next validation decides.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(check_on_train_epoch_end=False, **options)
        self._stopped_with: dict[str, Any] | None = None  # options with which a validation stopped the run

    @property
    def _options(self) -> dict[str, Any]:
        names = ("patience", "min_delta", "check_finite", "stopping_threshold", "divergence_threshold")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"stopped_with": self._stopped_with}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})
        self._stopped_with = state_dict.get("stopped_with")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop a run that a validation has already stopped, even if `min_epochs` postponed the end."""
        trainer.should_stop = trainer.should_stop or self._stopped_with == self._options

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        should_stop, reason = super()._evaluate_stopping_criteria(current)
        if should_stop:
            self._stopped_with = self._options
        return should_stop, reason
