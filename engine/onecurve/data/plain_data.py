"""What callbacks, checkpoints and loggers do with the data of a run reaches the user's DataModule."""

from typing import Any

import lightning as L


class WithPlainData(L.LightningDataModule):
    """Hands everything that it does not have itself on to `plain`, which a subclass sets as its last attribute."""

    plain: L.LightningDataModule

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "plain":  # not yet unpickled
            raise AttributeError(name)
        if hasattr(type(self), name):
            return self.__getattribute__(name)  # a property that has failed, whose own error this shows
        return getattr(self.plain, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the DataModule, as callbacks do by `trainer.datamodule`, unless this class has it."""
        is_own = name in vars(self) or hasattr(type(self), name) or name in type(self).__annotations__
        super().__setattr__(name, value) if is_own or "plain" not in vars(self) else setattr(self.plain, name, value)

    def teardown(self, stage: str) -> None:
        self.plain.teardown(stage)

    def state_dict(self) -> dict[str, Any]:
        return self.plain.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.plain.load_state_dict(state_dict)

    def on_exception(self, exception: BaseException) -> None:
        self.plain.on_exception(exception)
