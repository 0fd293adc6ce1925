"""Private names of the strategies and loggers of Lightning 2.6: each override or attribute under a public name.

Lines are relative to https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch import loggers, strategies
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def _public(name: str) -> Any:
    """Return a property that reads and writes the attribute `name`."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))


class DDPStrategy(strategies.DDPStrategy):
    """DDP, with the network wrapped by `wrap`, and hooks registered by `register_hook`."""

    ddp_options = _public("_ddp_kwargs")  # arguments of DistributedDataParallel
    averager = _public("_model_averager")  # averages the weights under post-local SGD; otherwise None
    hook_state = _public("_ddp_comm_state")
    wrap = strategies.DDPStrategy._setup_model
    register_hook = strategies.DDPStrategy._register_ddp_hooks

    def _setup_model(self, model: nn.Module) -> Any:
        return self.wrap(model)

    def _register_ddp_hooks(self) -> None:
        self.register_hook()

    def _configure_launcher(self) -> None:
        if self.spawn_launcher is None:
            super()._configure_launcher()
        else:
            self._launcher = self.spawn_launcher(self, start_method="spawn")

    spawn_launcher: "type[SpawnLauncher] | None" = None  # instead of Lightning's launcher


class SpawnLauncher(_MultiProcessingLauncher):
    """Spawns processes, each of which calls `run_spawned`."""

    def _wrapping_function(self, process_idx: int, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.run_spawned(
            process_idx,
            trainer,
            lambda: super(SpawnLauncher, self)._wrapping_function(process_idx, trainer, *args, **kwargs),
        )

    def run_spawned(self, rank: int, trainer: L.Trainer, run: Callable[[], None]) -> None:
        """Run what each process does."""
        raise NotImplementedError


class ModelParallelStrategy(strategies.ModelParallelStrategy):
    """Starts the process group, and has the device mesh of `make_mesh`; Lightning's is one for tensor parallelism.

    (strategies/model_parallel.py, line 147)
    """

    def setup_environment(self) -> None:
        self._setup_distributed()
        self._device_mesh = self.make_mesh()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return self.wrap(model)

    def make_mesh(self) -> DeviceMesh:
        """Return the mesh of the processes."""
        raise NotImplementedError

    def wrap(self, model: nn.Module) -> nn.Module:
        """Parallelize the network."""
        raise NotImplementedError


class WandbLogger(loggers.WandbLogger):
    """Starts its run with `init_options`, which the constructor gathers, and names the artifacts of checkpoints."""

    init_options = _public("_wandb_init")  # arguments of `wandb.init`
    is_offline = _public("_offline")
    started = _public("_experiment")  # the W&B run, if it has begun

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned rank, which opens the W&B run by its id; Lightning would start the run."""
        return vars(self) | {"_experiment": None}

    def _scan_and_log_checkpoints(self, checkpoint_callback: ModelCheckpoint) -> None:
        self._checkpoint_name = self.artifact_name(checkpoint_callback)
        super()._scan_and_log_checkpoints(checkpoint_callback)

    def artifact_name(self, checkpoint_callback: ModelCheckpoint) -> str:
        """Return the name of the artifact of a callback's checkpoints."""
        raise NotImplementedError
