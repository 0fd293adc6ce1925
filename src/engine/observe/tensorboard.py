"""TensorBoard logger that also logs images and evaluations."""

from typing import Any

import numpy as np
from lightning.pytorch import loggers
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image

from src.engine.observe.evaluation_media import calibration_table, confusion_table, draw_mistakes


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
        """Log the evaluation of a stage, val or test: the mistakes as an image, the rest as tables."""
        step = evaluation["step"]
        self.log_image(f"images/{stage}_mistakes", [draw_mistakes(evaluation)], step)
        self.experiment.add_text(f"images/{stage}_confusion_matrix", confusion_table(evaluation), step)
        self.experiment.add_text(f"images/{stage}_calibration", calibration_table(evaluation), step)
