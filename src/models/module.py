"""The base class of every LightningModule in this template."""

from typing import Any

import lightning as L


class Module(L.LightningModule):
    """A LightningModule with a faster assignment of the current hook's name.

    Lightning assigns `_current_fx_name` about forty times per step. `nn.Module.__setattr__` takes a microsecond to find
    out that the value is no parameter, buffer or module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)
