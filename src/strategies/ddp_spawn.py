"""DDP whose processes Lightning spawns itself, as the tutorials do; `strategy=ddp` starts faster and fails cleaner."""

from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy

from src.launch.logs import log_to_folder


class DDPSpawn(DDPStrategy):
    """Runs in one process, which spawns a process per device for each of fit and test."""

    single_process = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(start_method="spawn", **kwargs)

    def setup(self, trainer: L.Trainer) -> None:
        log_to_folder(trainer.default_root_dir, self.global_rank)
        super().setup(trainer)
