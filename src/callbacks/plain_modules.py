"""Support for LightningModules that were not written for this template."""

import lightning as L

from src.optim.optimizer_state import name_parameters, shard


class PlainModules(L.Callback):
    """Names the parameters of any module's optimizers: by name, a checkpoint is restored under any strategy."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            name_parameters(optimizer, pl_module)
            optimizer.register_load_state_dict_pre_hook(lambda own, saved: shard(saved, own))
