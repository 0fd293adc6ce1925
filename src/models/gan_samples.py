"""Save a square grid of generated images, always from the same noise."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from PIL import Image
from torch import Tensor

from onecurve import UserError, atomic_write


class SampleGrid(L.Callback):
    """Writes the grid as `samples/step000123.png` into the run folder after each validation.

    W&B gets it as `images/samples`.

    Args:
        count: number of images in the grid, a square number.
    """

    def __init__(self, count: int = 64) -> None:
        self.side = math.isqrt(max(0, count))
        if count < 1 or self.side**2 != count:
            raise UserError(f"callbacks.samples.count={count} is no square number: use 16, 64 or 100")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not hasattr(pl_module, "sample"):
            raise UserError("callbacks.samples is for modules that generate images: omit it, or use experiment=gan")

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        grid = Image.fromarray(self._make_grid(trainer, pl_module.sample(self.side**2)).numpy())
        file = Path(trainer.default_root_dir) / "samples" / f"step{trainer.global_step:06d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary:
            grid.save(temporary, "png")
        for logger in trainer.loggers:
            if hasattr(logger, "log_image"):
                logger.log_image("images/samples", [grid], step=trainer.global_step)

    def _make_grid(self, trainer: L.Trainer, images: Tensor) -> Tensor:
        """Return the grid, (height, width, channels) uint8, of (n, channels, height, width) normalized images."""
        pixels = (trainer.datamodule.to_pixels(images.float()) * 255).round().to(torch.uint8).cpu()
        rows = pixels.unflatten(0, (self.side, self.side)).permute(0, 3, 1, 4, 2)
        return rows.reshape(self.side * pixels.shape[2], -1, pixels.shape[1])
