"""DDP whose processes Lightning spawns itself, as the tutorials do; `strategy=ddp` starts faster and fails cleaner."""

from typing import Any

import lightning as L
import torch.multiprocessing as mp
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from src.loggers.wandb import finish, preempted
from src.strategies.ddp import DDP
from src.utils import signals
from src.utils.malloc import tune_malloc
from src.utils.process_group import close_process_group
from src.utils.rank_log import log_to_folder


class DDPSpawn(DDP):
    """Runs in one process, which spawns a process per device for each of fit and test."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(start_method="spawn", **kwargs)

    def setup(self, trainer: L.Trainer) -> None:
        log_to_folder(trainer.default_root_dir, self.global_rank)
        if self.root_device.type == "cpu":
            tune_malloc()
        super().setup(trainer)

    def _configure_launcher(self) -> None:
        self._launcher = _Launcher(self, start_method="spawn")


class _Launcher(_MultiProcessingLauncher):
    """Ends each process in order, and tells the first one at which step and epoch to log what is tested after fit."""

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        handlers = signals.install_handlers(
            signals.on_signal
        )  # the spawned ones have theirs; this process waits for them
        try:
            return super().launch(*args, **kwargs)
        except mp.ProcessExitedException as ended:
            if ended.exit_code > 128:
                raise signals.Stopped(ended.exit_code - 128) from None
            raise
        finally:
            signals.restore(handlers)

    def _wrapping_function(self, process_idx: int, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        try:
            super()._wrapping_function(process_idx, trainer, *args, **kwargs)
        except BaseException as error:
            for logger in trainer.loggers:
                logger.finalize("failed")  # as Lightning does where it spawns nothing
            if stopped := isinstance(error, signals.Stopped):
                preempted()
            finish(succeeded=False)
            if stopped:  # on all ranks at once
                close_process_group()
            raise
        finish(succeeded=True)
        close_process_group()

    def get_extra_results(self, trainer: L.Trainer) -> dict[str, Any]:
        loop = trainer.fit_loop
        return super().get_extra_results(trainer) | {
            "step": loop.epoch_loop._batches_that_stepped,
            "epoch": trainer.current_epoch,
        }

    def update_main_process_results(self, trainer: L.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        trainer.fit_loop.epoch_loop._batches_that_stepped = extra["step"]
        trainer.fit_loop.epoch_progress.current.completed = extra["epoch"]
