"""Private names of the strategies of Lightning 2.6: each override or attribute under a public name.

Lines are relative to https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/.
"""

from lightning.pytorch import strategies
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
