"""Evaluations as images and charts of the loggers."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from src.engine.observe.evaluation_media import draw_mistakes, wandb_media
from src.engine.observe.tensorboard import TensorBoardLogger


def png(mode: str) -> str:
    file = io.BytesIO()
    Image.new(mode, (32, 32), "red" if mode == "RGB" else 128).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def mistake(sample_index: int, mode: str = "RGB") -> dict[str, Any]:
    return {"sample_index": sample_index, "label": 0, "predicted": 1, "probability": 0.987, "image": png(mode)}


def evaluation(mistakes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a file `evaluation/val.json` with two classes, one of which has no sample."""
    empty = {"count": 0, "confidence": None, "accuracy": None}
    bins = [empty] * 14 + [{"count": 5, "confidence": 0.95, "accuracy": 0.6}]
    return {
        "step": 7,
        "classes": ["cat", "dog"],
        "confusion": [[3, 2], [0, 0]],
        "calibration": {"error": 0.35, "bins": bins},
        "mistakes": mistakes,
    }


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_draws_mistakes(mode: str) -> None:
    drawn = np.asarray(draw_mistakes(evaluation([mistake(index, mode) for index in range(9)])))
    color = (255, 0, 0) if mode == "RGB" else (128, 128, 128)
    assert (drawn == color).all(-1).sum() == 9 * 96 * 96, "nine images, none covers another"


def test_wandb_gets_charts_a_table_and_images() -> None:
    media = wandb_media("val", evaluation([mistake(4), mistake(2)]))
    assert media["images/val_confusion_matrix"].table.data == [
        ["cat", "cat", 3],
        ["cat", "dog", 2],
        ["dog", "cat", 0],
        ["dog", "dog", 0],
    ]
    assert media["images/val_class_accuracy"].data == [["cat", 5, 0.6], ["dog", 0, None]]
    lines = [[0.95, "accuracy", 0.6], [0.95, "perfect calibration", 0.95]]
    assert media["images/val_calibration"].table.data == lines
    sheet: wandb.Image = media["images/val_mistakes"]
    assert sheet.image.size == draw_mistakes(evaluation([mistake(4)])).size


def test_tensorboard_gets_images(tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path), name="", version="tensorboard")
    logger.log_evaluation("val", evaluation([mistake(4)]))
    logger.log_image("samples", [Image.new("L", (8, 8)), Image.new("L", (8, 8))], step=7)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["images"]) == {"images/val_mistakes", "samples/0", "samples/1"}
