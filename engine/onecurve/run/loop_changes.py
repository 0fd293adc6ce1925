"""Changes of Lightning's loops, also those of an evaluation."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.nn.parameter import is_lazy

from onecurve.checks.schedules import plateau_configs
from onecurve.errors import UserError
from onecurve.parallel.batch_norm import grouped_norms
from onecurve.parallel.norm_groups import NormGroups
from onecurve.patches.lightning_loops import CheckpointConnector
from onecurve.patches.torch import tree_flatten
from onecurve.process.gather import gather_objects
from onecurve.process.started_by import variables_replaced
from onecurve.random.dropout import use_sample_dropout

_BATCH_HOOKS = [name for name in vars(L.Callback) if name.startswith(("on_before", "on_after")) or "_batch_" in name]


def _skip_empty_hooks(callbacks: Iterable[L.Callback]) -> None:
    """Let Lightning pass over hooks of a batch that a callback does not have (docs/benchmarks/speed.md has the gain).

    Lightning calls no hook that is not callable (trainer/call.py, `_call_callback_hooks`). Callbacks of a project stay
    as they are, because their code may call each other's hooks.
    """
    for callback in callbacks:
        if type(callback).__module__.startswith(("onecurve.", "lightning.")):
            for hook in _BATCH_HOOKS:
                if getattr(type(callback), hook) is getattr(L.Callback, hook):
                    vars(callback).setdefault(hook, None)


class PreparingConnector(CheckpointConnector):
    """Prepares layers that a module makes in `setup` or `configure_model`, as `Trainer.prepare_module` the others.

    No hook of Lightning comes between these and the strategy, which wraps the module. It calls `resume_start` in each
    stage, without a checkpoint too (trainer/trainer.py, line 1046). Ranks that have found different ones are refused.
    """

    def resume_start(self, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        found = gather_objects(checkpoint_path and Path(checkpoint_path).name)
        if len(set(found)) > 1:
            raise UserError(
                f"ckpt_path: the processes have found different checkpoints ({', '.join(map(str, found))}): let "
                "default_root_dir be in a folder that all nodes share"
            )
        trainer: Any = self.trainer
        module = trainer.lightning_module
        trainer.precision_plugin.convert_module(module)
        use_sample_dropout(module)
        lazy = [name for name, weight in module.named_parameters() if is_lazy(weight)]
        if lazy and trainer.state.fn == "fit":
            raise UserError(f"{lazy[0]} has no shape yet: call its layer with an example in setup or configure_model")
        for callback in trainer.callbacks:
            if isinstance(callback, NormGroups):
                callback.setup(trainer, module, trainer.state.fn)
        super().resume_start(checkpoint_path, *args, **kwargs)


class LoopChanges(L.Callback):
    """Changes what Lightning's loops do, by hooks that come before those of the user.

    - `configure_optimizers` sees one process, log points know the last step, and empty hooks are passed over.
    - A sanity check takes the same samples on any hardware.
    - Layers of batch normalization know whether a step calls them, or a hook.
    - ReduceLROnPlateau makes up for a step: Lightning takes it after an epoch's checkpoint is saved, and not at all
      after the first epoch of a restart (`_FitLoop.on_advance_end` and `_TrainingEpochLoop._update_learning_rates` in
      loops/).
    - Predictions have the samples of a batch, which Lightning reads from a batch sampler of its own
      (`_get_batch_indices` in loops/prediction_loop.py).
    """

    _sanity_steps: int | float | None = None  # those of one part, in a sanity check

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._missed = set[int]()  # epochs that begin with a step of the epoch before, which Lightning left out
        strategy: Any = trainer.strategy
        strategy.setup_optimizers = partial(_setup_optimizers, type(strategy).setup_optimizers, strategy)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        epoch = checkpoint["position"]["epoch"]
        checkpoint["plateau_is_behind"] = trainer.current_epoch < epoch or epoch in self._missed

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.training:  # an evaluation may have a file of plain Lightning, without a position
            first = checkpoint["position"]["epoch"]
            self._missed = {first, first + 1} if checkpoint.get("plateau_is_behind") else {first + 1}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.last_step = trainer.datamodule.last_step  # `is_log_point` reads it
        _skip_empty_hooks(trainer.callbacks)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the same samples on any hardware: a module may keep something of them, such as the best metric."""
        self._sanity_steps = trainer.num_sanity_val_steps
        # The samples end it. The ranks may divide them into up to twice as many batches, and one more.
        trainer.num_sanity_val_steps = (2 * self._sanity_steps + 1) * trainer.datamodule.division.num_parts

    def on_sanity_check_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if self._sanity_steps is not None:
            trainer.num_sanity_val_steps, self._sanity_steps = self._sanity_steps, None
            _check_first(trainer, math.inf)

    on_exception = on_sanity_check_end  # another fit of this trainer begins with the same number

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let hooks normalize batches of their own, which are whole on each rank: before the callbacks of the user."""
        self._norms = list(grouped_norms(pl_module))
        for norm in self._norms:
            norm.is_in_step = False

    on_train_epoch_end = on_train_start

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_train_start(trainer, pl_module)
        if self._sanity_steps is not None and self._sanity_steps < math.inf:
            loaders = _check_first(trainer, self._sanity_steps)  # whose lengths Lightning has read by now
            trainer.num_sanity_val_steps = max(map(len, loaders))  # for progress bars

    def on_train_batch_start(self, *_: Any) -> None:
        for norm in self._norms:
            norm.is_in_step = True
        self._norms.clear()

    def on_predict_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Give each `BasePredictionWriter` the indices of its samples in the dataset, with -1 for padding."""
        if any(isinstance(one, BasePredictionWriter) for one in trainer.callbacks):
            loop = trainer.predict_loop
            loop.current_batch_indices = trainer.datamodule.sample_index.tolist()
            loop.epoch_batch_indices[dataloader_idx].append(loop.current_batch_indices)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epoch, metrics = trainer.current_epoch, trainer.callback_metrics
        progress = trainer.fit_loop.epoch_progress.current
        if epoch not in self._missed:
            return
        progress.completed -= 1  # the module's `lr_scheduler_step` may read the epoch, which is the one before
        for config in plateau_configs(trainer):
            if epoch % config.frequency == 0 and config.monitor in metrics:
                pl_module.lr_scheduler_step(config.scheduler, metrics[config.monitor])
        progress.completed += 1
        self._missed.remove(epoch)


def _check_first(trainer: L.Trainer, steps: float) -> list[Any]:
    """Let the loaders of validation yield the samples of so many batches of the user's, and return them."""
    collection = cast(Any, L.Trainer.val_dataloaders).fget(trainer)  # None if a hook has failed before
    loaders = [] if collection is None else tree_flatten(collection)[0]
    for loader in loaders:
        loader.sampler.checked = steps
    return loaders


def _setup_optimizers(setup: Callable[..., None], strategy: Any, trainer: L.Trainer) -> None:
    """Set the optimizers up: `configure_optimizers` sees one process, by whose number it may multiply a rate."""
    module, size = trainer.lightning_module, dist.get_world_size
    one = mock.patch.object(dist, "get_world_size", lambda group=None: 1 if group is None else size(group))
    configure = variables_replaced(["WORLD_SIZE"], WORLD_SIZE="1")(one(module.configure_optimizers))
    with mock.patch.object(module, "configure_optimizers", configure):
        setup(strategy, trainer)
