"""What every LightningModule of this template inherits."""

from typing import Any

import lightning as L


class Module(L.LightningModule):
    """A LightningModule that is told at once which hook is under way: Lightning says so some forty times a step."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":
            self.__dict__[name] = value  # no parameter, buffer or module, which nn.Module takes a microsecond to see
        else:
            super().__setattr__(name, value)
