"""TensorBoard logger that also logs images."""

from typing import Any

import numpy as np
from lightning.pytorch import loggers
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image

from src.engine.observe.evaluation_media import draw_mistakes


class TensorBoardLogger(loggers.TensorBoardLogger):
    """Lightning's TensorBoardLogger, with the methods by which callbacks log images and evaluations."""

    @rank_zero_only
    def log_image(self, key: str, images: list[Image.Image], step: int | None = None) -> None:
        """Log each image under the key, and its number if there are several."""
        for number, image in enumerate(images):
            tag = key if len(images) == 1 else f"{key}/{number}"
            self.experiment.add_image(tag, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    @rank_zero_only
    def log_evaluation(self, stage: str, evaluation: dict[str, Any]) -> None:
        """Log the mistakes of the evaluation of a stage, val or test, as an image."""
        self.log_image(f"images/{stage}_mistakes", [draw_mistakes(evaluation)], evaluation["step"])
