"""TensorBoard logger that also logs images and evaluations."""

from typing import Any

import numpy as np
from lightning.pytorch import loggers
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image

from src.loggers.evaluation_media import draw_confusion, draw_mistakes


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
        """Log what `src/callbacks/evaluation.py` records of a stage, val or test."""
        step = evaluation["step"]
        self.log_image(f"images/{stage}_confusion_matrix", [draw_confusion(evaluation)], step)
        self.log_image(f"images/{stage}_mistakes", [draw_mistakes(evaluation)], step)
        self.experiment.add_text(
            f"images/{stage}_calibration", _calibration_table(evaluation["calibration"]["bins"]), step
        )


def _calibration_table(bins: list[dict[str, Any]]) -> str:
    """Return the bins that have samples as a table in Markdown."""
    rows = [f"| {row['confidence']:.3f} | {row['accuracy']:.3f} | {row['count']} |" for row in bins if row["count"]]
    return "\n".join(["| mean probability | accuracy | samples |", "| --- | --- | --- |", *rows])
