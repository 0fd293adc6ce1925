"""Images for the loggers that can show them: Weights & Biases and TensorBoard."""

from collections.abc import Sequence

import lightning as L
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from PIL.Image import Image


def log_images(trainer: L.Trainer, name: str, images: Sequence[Image], captions: Sequence[str] | None = None) -> None:
    """Log images of one size as `images/NAME` at the current step; call it on rank zero.

    Args:
        trainer: its loggers get the images; loggers that show none are left out.
        name: without a slash, so that W&B's dashboard has one section for all images.
        images: at least one.
        captions: a line per image, which TensorBoard does not show.
    """
    key, step = f"images/{name}", trainer.global_step
    for logger in trainer.loggers:
        if hasattr(logger, "log_image"):
            logger.log_image(key, list(images), step=step, **({"caption": list(captions)} if captions else {}))
        elif isinstance(logger, TensorBoardLogger):
            pixels = np.stack([np.asarray(image.convert("RGB")) for image in images])
            logger.experiment.add_images(key, pixels, step, dataformats="NHWC")
