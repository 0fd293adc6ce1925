"""An evaluation of `src/engine/observe/evaluation.py` as an image of its mistakes, and as objects of wandb."""

import base64
import io
from typing import Any

from PIL import Image, ImageDraw

_TILE, _CAPTION, _COLUMNS = 96, 28, 8  # pixels of a mistake's image and of the text below it; mistakes per row


def draw_mistakes(evaluation: dict[str, Any]) -> Image.Image:
    """Draw the images of the mistakes in a grid, each above its classes and its probability."""
    classes, mistakes = evaluation["classes"], evaluation["mistakes"]
    rows = max(1, -(-len(mistakes) // _COLUMNS))
    grid = Image.new("RGB", (_COLUMNS * (_TILE + 4), rows * (_TILE + _CAPTION + 4)), "white")
    draw = ImageDraw.Draw(grid)
    for number, mistake in enumerate(mistakes):
        x, y = number % _COLUMNS * (_TILE + 4), number // _COLUMNS * (_TILE + _CAPTION + 4)
        image = Image.open(io.BytesIO(base64.b64decode(mistake["image"]))).convert("RGB")
        grid.paste(image.resize((_TILE, _TILE), Image.Resampling.NEAREST), (x, y))
        label, predicted = classes[mistake["label"]], classes[mistake["predicted"]]
        text = f"{label}\nas {predicted}, {mistake['probability']:.1%}"
        draw.text((x, y + _TILE), text, "black", spacing=2)
    return grid


def wandb_media(stage: str, evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return what `wandb.log` takes for an evaluation of a stage, val or test."""
    import wandb

    classes, matrix = evaluation["classes"], evaluation["confusion"]
    # wandb's chart takes the label and the prediction of each sample.
    pairs = [
        (label, predicted)
        for label, counts in enumerate(matrix)
        for predicted, count in enumerate(counts)
        for _ in range(count)
    ]
    labels, predictions = ([pair[part] for pair in pairs] for part in (0, 1))
    bins = [row for row in evaluation["calibration"]["bins"] if row["count"]]
    confidence, accuracy = ([row[key] for row in bins] for key in ("confidence", "accuracy"))
    class_rows = [
        [name, sum(counts), counts[label] / sum(counts) if sum(counts) else None]
        for label, (name, counts) in enumerate(zip(classes, matrix, strict=True))
    ]
    return {
        f"images/{stage}_confusion_matrix": wandb.plot.confusion_matrix(
            y_true=labels, preds=predictions, class_names=classes, title=f"Confusion matrix, {stage}"
        ),
        f"images/{stage}_calibration": wandb.plot.line_series(
            xs=confidence,
            ys=[accuracy, confidence],
            keys=["accuracy", "perfect calibration"],
            title=f"Calibration, {stage}",
            xname="probability",
        ),
        f"images/{stage}_class_accuracy": wandb.Table(columns=["class", "samples", "accuracy"], data=class_rows),
        # One image of all mistakes: 64 files of each validation would be thousands in a long run.
        f"images/{stage}_mistakes": wandb.Image(draw_mistakes(evaluation)),
    }
