"""What a module and its data see of their trainer; a DataModule for modules with loaders, or for those of a script."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning as L
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden

from onecurve.process.started_by import OF_A_RANK, variables_replaced


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
        return self._trainer.estimated_stepping_batches if data.has_training_data else data.total_steps

    def __getattr__(self, name: str) -> Any:
        if name == "_trainer":  # not yet unpickled
            raise AttributeError(name)
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)


class OneProcess(ModuleTrainer):
    """The trainer that a DataModule sees: that of a run on one process."""

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(trainer, world_size=1)
        vars(self).update(global_rank=0, local_rank=0, node_rank=0)


@contextmanager
def as_one_process() -> Iterator[None]:
    """Let torch.distributed and the variables of launchers describe a run of one process."""
    functions: dict[str, Any] = {"is_initialized": lambda: False, "get_rank": lambda group=None: 0}
    functions["get_world_size"] = lambda group=None: 1
    with mock.patch.multiple(dist, **functions), variables_replaced(OF_A_RANK):
        yield


class ModuleData(L.LightningDataModule):
    """Hands out the loaders of the module (`data=module`)."""

    _given: Mapping[str, Any] = {}

    def setup(self, stage: str) -> None:
        """Set a module up that has loaders, and may make its datasets; Lightning would ask for the loaders before."""
        if any(map(self._has_loader, ("train", "val", "test", "predict"))):
            type(self._module).setup(self._module, stage)
            attributes = vars(self._module)
            attributes["setup"] = lambda stage: attributes.pop("setup")  # Lightning calls it next, once

    def train_dataloader(self) -> Any:
        return self._loader("train")

    def val_dataloader(self) -> Any:
        return self._loader("val")

    def test_dataloader(self) -> Any:
        return self._loader("test")

    def predict_dataloader(self) -> Any:
        return self._loader("predict")

    def _loader(self, name: str) -> Any:
        return getattr(self._module, f"{name}_dataloader")() if self._has_loader(name) else self._given.get(name)

    def _has_loader(self, name: str) -> bool:
        return self._given.get(name) is None and is_overridden(f"{name}_dataloader", self._module, L.LightningModule)

    @property
    def _module(self) -> Any:
        assert self.trainer
        return self.trainer.lightning_module


class GivenLoaders(ModuleData):
    """Hands out loaders that a script has given to the trainer, and those of the module for others.

    Args:
        loaders: a loader, a list or dictionary of several, or None, by `train`, `val`, `test` and `predict`.
    """

    def __init__(self, loaders: dict[str, Any]) -> None:
        super().__init__()
        self.description, self._given = "loaders of a script", loaders
