"""Stop unpromising Optuna trials early."""

import logging
from typing import Any

import lightning as L

_log = logging.getLogger(__name__)
PRUNED = "pruned"  # the trial's attribute from which the sweeper learns it


class Pruning(L.Callback):
    """Tells Optuna the metric after each validation; rank zero asks whether to go on, and all ranks stop together.

    Optuna's own callback for Lightning wants a `Trial`, which cannot travel to another process.
    """

    def __init__(self, monitor: str, pruner: Any, trial: dict[str, Any] | None = None) -> None:
        """`trial` is what the sweeper sets: its `storage`, `study` and `number`; None outside of such a sweep."""
        self.monitor, self.pruner, self.address = monitor, pruner, trial
        self._trial: Any = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.address is None:
            _log.warning("callbacks=pruning does nothing here: this is no trial of hydra/sweeper=optuna")
        elif trainer.is_global_zero:
            self._trial = self._load(**self.address)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.address is None or trainer.sanity_checking:
            return
        stop = trainer.strategy.broadcast(trainer.is_global_zero and self._should_prune(trainer))
        trainer.should_stop = trainer.should_stop or stop

    def _load(self, storage: str, study: str, number: int) -> Any:
        import optuna

        opened = optuna.storages.get_storage(storage)
        trials = optuna.load_study(study_name=study, storage=opened, pruner=self.pruner)
        identifier = opened.get_trial_id_from_study_id_trial_number(opened.get_study_id_from_name(study), number)
        return optuna.trial.Trial(trials, identifier)

    def _should_prune(self, trainer: L.Trainer) -> bool:
        self._trial.report(float(trainer.callback_metrics[self.monitor]), trainer.current_epoch)
        if not self._trial.should_prune():
            return False
        self._trial.set_user_attr(PRUNED, True)
        _log.info("pruned after epoch %d: %s is worse than that of other trials", trainer.current_epoch, self.monitor)
        return True
