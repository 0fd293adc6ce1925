"""Private names of the strategies and loggers of Lightning 2.6: each override or attribute under a public name.

Lines are relative to https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/.
"""

from typing import Any

from lightning.pytorch import loggers, strategies
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as SpawnLauncher
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["SpawnLauncher"]  # spawns the processes of a strategy, which takes a launcher of any class


class ModelParallelStrategy(strategies.ModelParallelStrategy):
    """Starts the process group, and has the device mesh of `make_mesh`; Lightning's is one for tensor parallelism.

    (strategies/model_parallel.py, line 147)
    """

    def setup_environment(self) -> None:
        self._setup_distributed()
        self._device_mesh = self.make_mesh()

    def make_mesh(self) -> DeviceMesh:
        """Return the mesh of the processes."""
        raise NotImplementedError


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
        self._checkpoint_name = self.artifact_name(checkpoint_callback)
        super()._scan_and_log_checkpoints(checkpoint_callback)

    def artifact_name(self, checkpoint_callback: ModelCheckpoint) -> str:
        """Return the name of the artifact of a callback's checkpoints."""
        raise NotImplementedError
