"""The base class of the LightningModules of this template; a module of one's own needs none of it."""

from typing import Any

import lightning as L


class Module(L.LightningModule):
    """A LightningModule whose steps take a `Batch`, with a faster assignment of the current hook's name.

    Attributes:
        takes_batch: the data module then passes on `src.data.batch.Batch`; any other module gets (image, target).

    Lightning assigns `_current_fx_name` about forty times per step. `nn.Module.__setattr__` takes a microsecond to find
    out that the value is no parameter, buffer or module.
    """

    takes_batch = True

    @property
    def allows_fused_optimizer(self) -> bool:
        """Whether the strategy and the precision of the run can use a fused optimizer.

        ZeRO keeps step counts on the CPU. A fused optimizer divides the gradients by the loss scale in its own step,
        and Lightning refuses to clip them before that.
        """
        shards_state = getattr(self.trainer.strategy, "shard_optimizer", False)
        clips_scaled = self.trainer.precision == "16-mixed" and bool(self.trainer.gradient_clip_val)
        return not (shards_state or clips_scaled)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)
