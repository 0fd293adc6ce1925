"""Private names of the WandbLogger of Lightning 2.6, under public names.

The public `WandbLogger(experiment=...)` takes a W&B run that has begun; here it begins after all checks, on its rank.
"""

from typing import Any

from lightning.pytorch import loggers
from lightning.pytorch.callbacks import ModelCheckpoint


class WandbLogger(loggers.WandbLogger):
    """Names the artifacts of checkpoints, and shows what Lightning's logger keeps to itself."""

    @property
    def init_options(self) -> dict[str, Any]:
        """The arguments of `wandb.init`, which the constructor gathers."""
        return self._wandb_init

    @property
    def started(self) -> Any:
        """The W&B run, if it has begun."""
        return self._experiment

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned rank, which opens the W&B run by its id; Lightning would start the run."""
        return vars(self) | {"_experiment": None}

    def _scan_and_log_checkpoints(self, checkpoint_callback: ModelCheckpoint) -> None:
        # Lightning gives all callbacks one name, so the alias "best" would move from best.ckpt to last.ckpt.
        self._checkpoint_name = f"model-{self.version}" + ("" if checkpoint_callback.monitor else "-last")
        super()._scan_and_log_checkpoints(checkpoint_callback)
