"""Stop a trial of Optuna early that is worse than others."""

import logging
from typing import Any

import lightning as L

from onecurve.errors import UserError

_log = logging.getLogger(__name__)
PRUNED = "pruned"  # attribute of a pruned trial, which the sweeper reads


class Pruning(L.Callback):
    """Reports the metric to Optuna after each validation; if Optuna prunes the trial, all ranks stop.

    Optuna's own callback for Lightning needs a `Trial`, which cannot be sent to another process.

    Args:
        monitor: name of the metric.
        pruner: pruner of Optuna.
        trial: `storage`, `study` and `number` of the trial, which the sweeper sets; None outside of an Optuna sweep.
    """

    def __init__(self, monitor: str, pruner: Any, trial: dict[str, Any] | None = None) -> None:
        self.monitor, self.pruner, self.address = monitor, pruner, trial
        self._trial: Any = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.address is None:
            _log.warning("callbacks=pruning has no effect: this run is no trial of hydra/sweeper=optuna")
        elif trainer.is_global_zero:
            self._trial = self._load(**self.address)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.address is None or trainer.sanity_checking:
            return
        if self.monitor not in trainer.callback_metrics:  # on every rank, before they wait for rank zero
            raise UserError(
                f"callbacks.pruning.monitor={self.monitor} is not logged in validation: take one of "
                f"{', '.join(sorted(trainer.callback_metrics))}"
            )
        should_prune = trainer.strategy.broadcast(trainer.is_global_zero and self._should_prune(trainer))
        trainer.should_stop = trainer.should_stop or should_prune

    def _load(self, storage: str, study: str, number: int) -> Any:
        import optuna

        opened_storage = optuna.storages.get_storage(storage)
        opened_study = optuna.load_study(study_name=study, storage=opened_storage, pruner=self.pruner)
        study_id = opened_storage.get_study_id_from_name(study)
        trial_id = opened_storage.get_trial_id_from_study_id_trial_number(study_id, number)
        return optuna.trial.Trial(opened_study, trial_id)

    def _should_prune(self, trainer: L.Trainer) -> bool:
        self._trial.report(float(trainer.callback_metrics[self.monitor]), trainer.current_epoch)
        if not self._trial.should_prune():
            return False
        self._trial.set_user_attr(PRUNED, True)
        _log.info("pruned after epoch %d: %s is worse than that of other trials", trainer.current_epoch, self.monitor)
        return True
