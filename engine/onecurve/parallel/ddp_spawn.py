"""DDP in processes that Lightning spawns, as in many tutorials; `strategy=ddp` starts faster and shuts down better."""

import os
import signal
from collections.abc import Callable
from copy import deepcopy
from functools import cached_property
from pickle import PicklingError
from typing import Any

import lightning as L
import torch.multiprocessing as mp
from torch import Tensor

from onecurve.errors import UserError
from onecurve.observe.wandb import wandb_ends
from onecurve.parallel.ddp import DDP
from onecurve.patches.lightning_loops import set_progress, steps_of_loggers
from onecurve.patches.lightning_strategies import SpawnLauncher
from onecurve.process import signals
from onecurve.process.devices import tune_malloc
from onecurve.process.groups import process_group_closed
from onecurve.process.log import connect_debugger, log_to_folder


class _Launcher(SpawnLauncher):
    """Shuts each process down cleanly, and returns what a later test needs from fit to the main process.

    The test logs its metrics at the step and epoch of fit, and may read the best checkpoint.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        # This process only waits for the spawned ones, which install their own handlers.
        handlers = signals.install_handlers(signals.on_signal)
        try:
            return super().launch(_run_spawned, trainer, function, *args, trainer=trainer, **kwargs)
        except mp.ProcessExitedException as error:
            if number := signals.requested() or max(0, error.exit_code - 128):
                raise signals.Stopped(number) from None
            raise
        except (AttributeError, PicklingError, TypeError) as error:  # of a lambda, a lock, or an open file
            if "pickle" not in str(error) and "local object" not in str(error):
                raise
            raise UserError(
                f"strategy=ddp_spawn pickles trainer, module and data ({error}): use strategy=ddp"
            ) from error
        finally:
            signals.restore_handlers(handlers)

    def get_extra_results(self, trainer: L.Trainer) -> dict[str, Any]:
        return super().get_extra_results(trainer) | {
            "position": {"steps": steps_of_loggers(trainer), "epoch": trainer.current_epoch, "epoch_steps": 0},
            "best": [getattr(callback, "best_model_path", "") for callback in trainer.checkpoint_callbacks],
        }

    def update_main_process_results(self, trainer: L.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        set_progress(trainer, extra["position"])
        for callback, path in zip(trainer.checkpoint_callbacks, extra["best"], strict=True):
            callback.best_model_path = path


def _run_spawned(trainer: L.Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    rank = int(os.environ["LOCAL_RANK"])  # all ranks are on this host
    signals.prepare_started_process()
    connect_debugger(rank)
    log_to_folder(trainer.default_root_dir, rank=rank)  # Lightning logs before it sets the strategy up
    # The ranks share the memory of what they were given. Lightning copies weights and buffers only, so that the ranks
    # would add to each other's metrics (fabric/strategies/launchers/multiprocessing.py, line 223).
    copied: dict[int, Any] = {}
    for part in trainer.lightning_module.modules():
        own = {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}
        vars(part).update(deepcopy(own, copied))
    with process_group_closed(), wandb_ends():
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            for logger in trainer.loggers:
                logger.finalize("failed")  # Lightning does so only in processes that it did not spawn
            if isinstance(error, KeyboardInterrupt):  # torch would end the rank without an error or a result
                raise signals.Stopped(signal.SIGINT) from None
            raise


class DDPSpawn(DDP):
    """Runs in one process, which spawns one process per device, separately for fit and for test."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(start_method="spawn", **kwargs)

    @cached_property
    def launcher(self) -> _Launcher:
        return _Launcher(self, start_method="spawn")

    def setup(self, trainer: L.Trainer) -> None:
        if self.root_device.type == "cpu":
            tune_malloc()
        super().setup(trainer)
