"""A DataModule for a LightningModule that has its loaders itself, as in many tutorials."""

from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden


class ModuleData(L.LightningDataModule):
    """Hands out the loaders of the module (`data=module`)."""

    def setup(self, stage: str) -> None:
        """Set the module up, which may make its datasets; Lightning would do so only after it has asked for loaders."""
        module: Any = self._module
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

    def _loaders(self, name: str) -> Any:
        return getattr(self._module, name)() if is_overridden(name, self._module, L.LightningModule) else None

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

    def _loaders(self, name: str) -> Any:
        given = self._given.get(name)
        return super()._loaders(name) if given is None else given
