"""The base class of the LightningModules of this template; a module of one's own needs none of it."""

import lightning as L


class Module(L.LightningModule):
    """A LightningModule whose steps take a `Batch`.

    Attributes:
        takes_batch: the data module then passes on `src.data.batch.Batch`; any other module gets (image, target).
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
