"""What a LightningModule sees of its trainer; a DataModule for one that has its loaders itself, or is given some."""

from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden


class ModuleTrainer:
    """A trainer with the world of the experiment: one process, or `virtual_ranks` with `bit_exact`.

    `lr * self.trainer.world_size` is a frequent line, and would make each number of processes another experiment.
    Everything else is the trainer's, and what the module sets too. So `global_rank` and `is_global_zero` tell processes
    apart. Lightning itself asks a module's trainer for no world. It hands this object on to callbacks in three hooks:
    before and after `backward`, and before the optimizer's step (plugins/precision/precision.py).
    """

    def __init__(self, trainer: L.Trainer, world_size: int) -> None:
        vars(self).update(_trainer=trainer, world_size=world_size, num_devices=world_size, num_nodes=1)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of steps, also in a `setup` that comes before the loaders are taken apart."""
        data: Any = self._trainer.datamodule
        return self._trainer.estimated_stepping_batches if data.has_training_data else data.count_steps()

    def __getattr__(self, name: str) -> Any:
        if name == "_trainer":  # not yet unpickled
            raise AttributeError(name)
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)


class ModuleData(L.LightningDataModule):
    """Hands out the loaders of the module (`data=module`)."""

    def setup(self, stage: str) -> None:
        """Set a module up that has loaders, and may make its datasets; Lightning would ask for the loaders before."""
        module: Any = self._module
        if not any(self._has_loaders(f"{name}_dataloader") for name in ("train", "val", "test", "predict")):
            return
        type(module).setup(module, stage)
        module.setup = lambda stage: None  # Lightning calls it next

    def train_dataloader(self) -> Any:
        return self._loaders("train_dataloader")

    def val_dataloader(self) -> Any:
        return self._loaders("val_dataloader")

    def test_dataloader(self) -> Any:
        return self._loaders("test_dataloader")

    def predict_dataloader(self) -> Any:
        return self._loaders("predict_dataloader")

    def _has_loaders(self, name: str) -> bool:
        """Return whether the loaders of this name are the module's."""
        return is_overridden(name, self._module, L.LightningModule)

    def _loaders(self, name: str) -> Any:
        return getattr(self._module, name)() if self._has_loaders(name) else None

    @property
    def _module(self) -> L.LightningModule:
        assert self.trainer
        return self.trainer.lightning_module


class GivenLoaders(ModuleData):
    """Hands out loaders that a script has given to the trainer, and those of the module for others.

    Args:
        loaders: a loader, a list or dictionary of several, or None, by `train`, `val`, `test` and `predict`.
    """

    def __init__(self, loaders: dict[str, Any]) -> None:
        super().__init__()
        self.description = "loaders of a script"
        self._given = {f"{name}_dataloader": loader for name, loader in loaders.items()}

    def _has_loaders(self, name: str) -> bool:
        return self._given.get(name) is None and super()._has_loaders(name)

    def _loaders(self, name: str) -> Any:
        given = self._given.get(name)
        return super()._loaders(name) if given is None else given
