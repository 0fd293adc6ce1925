"""Support for LightningModules that were not written for this template."""

from typing import Any

import lightning as L
from torch import Tensor

from src.optim.optimizer_state import shard
from src.optim.parameter_names import name_parameters

_HYPER_PARAMETERS, _TYPE = "hyper_parameters", "hparams_type"  # keys of Lightning's checkpoints


class PlainModules(L.Callback):
    """Adapts what any LightningModule does to the contracts of this template.

    Optimizers get the names of their parameters, by which a checkpoint is restored under any strategy and in any order.
    Checkpoints keep only those hyper-parameters (`save_hyperparameters`) that can be loaded without running code.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            name_parameters(optimizer, pl_module)
            optimizer.register_load_state_dict_pre_hook(lambda own, saved: shard(saved, own))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if _HYPER_PARAMETERS in checkpoint:
            saved = checkpoint[_HYPER_PARAMETERS]
            checkpoint[_HYPER_PARAMETERS] = {key: value for key, value in saved.items() if _is_plain(value)}
            checkpoint.pop(_TYPE, None)


def _is_plain(value: Any) -> bool:
    """Return whether torch.load reads a value with weights_only=True."""
    if type(value) is dict:
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, bytes, bool, int, float, Tensor)
