"""The trainer that a LightningModule sees: its world is that of the experiment, not of the hardware."""

from typing import Any

import lightning as L


class ModuleTrainer:
    """A trainer with the world of the experiment: one process, or `virtual_ranks` with `bit_exact`.

    `lr * self.trainer.world_size` is a frequent line, and would make each number of processes another experiment.
    Everything else is the trainer's, and what the module sets too. So `global_rank` and `is_global_zero` tell processes
    apart. Lightning itself asks a module's trainer for no world. It hands this object on to callbacks in three hooks:
    before and after `backward`, and before the optimizer's step (plugins/precision/precision.py).
    """

    def __init__(self, trainer: L.Trainer, world_size: int) -> None:
        vars(self).update(_trainer=trainer, world_size=world_size, num_devices=world_size, num_nodes=1)

    def __getattr__(self, name: str) -> Any:
        if name == "_trainer":  # not yet unpickled
            raise AttributeError(name)
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)


class ExperimentWorld(L.Callback):
    """Gives the module its trainer before its `setup`, `configure_model` and `configure_optimizers`."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        module: Any = pl_module
        module.trainer = ModuleTrainer(trainer, data.virtual_ranks if data.bit_exact else 1)
