"""Early stopping that a restart does not undo."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from src.utils.errors import UserError


class ResumableEarlyStopping(EarlyStopping):
    """Lightning's EarlyStopping, with a decision that lasts: a stopped run that is started again stays stopped.

    Each validation counts once. The options come from the configuration, not from the checkpoint, so that a larger
    `patience` or another threshold makes a stopped run go on.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(check_on_train_epoch_end=False, **options)
        self._latest: Tensor | None = None  # the score of the last validation
        self._stopped_with: dict[str, Any] | None = None  # the options under which a validation ended the run

    @property
    def _options(self) -> dict[str, Any]:
        names = ("patience", "min_delta", "check_finite", "stopping_threshold", "divergence_threshold")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"latest": self._latest, "stopped_with": self._stopped_with}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})
        self._latest, self._stopped_with = state_dict.get("latest"), state_dict.get("stopped_with")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop again if the run had been told to, which `min_epochs` may have put off.

        Raises:
            UserError: if nothing is validated.
        """
        data: Any = trainer.datamodule
        if not data.evaluated_samples("val"):
            raise UserError("callbacks.early_stopping needs validation: give data.val_fraction, or leave it out")
        trainer.should_stop = trainer.should_stop or self._stopped_with == self._options or self._has_stopped()

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        self._latest = current
        should_stop, reason = super()._evaluate_stopping_criteria(current)
        if should_stop:
            self._stopped_with = self._options
        return should_stop, reason

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
