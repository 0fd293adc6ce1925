"""An evaluation as images, and as objects of wandb: its confusion matrix, calibration and most confident mistakes."""

import base64
import io
from typing import Any

from PIL import Image, ImageDraw

_CELL = 36  # pixels per cell of the matrix
_TILE, _CAPTION, _COLUMNS = 96, 28, 8  # pixels of a mistake's image and of the text below it; mistakes per row
_WHITE, _BLACK, _BLUE = (255, 255, 255), (0, 0, 0), (31, 119, 180)


def decode_image(mistake: dict[str, Any]) -> Image.Image:
    """Return the image of a mistake, which the evaluation contains as PNG in base64."""
    return Image.open(io.BytesIO(base64.b64decode(mistake["image"])))


def describe_mistake(mistake: dict[str, Any], classes: list[str]) -> str:
    """Return the two classes and the probability of a mistake."""
    label, predicted = classes[mistake["label"]], classes[mistake["predicted"]]
    return f"{label}\nas {predicted}, {mistake['probability']:.1%}"


def draw_confusion(evaluation: dict[str, Any]) -> Image.Image:
    """Draw the matrix, one row per class: the color shows the fraction of the row, the number counts samples."""
    classes, matrix = evaluation["classes"], evaluation["confusion"]
    names = [f"{number} {name}" for number, name in enumerate(classes)]
    left = 10 + round(max(ImageDraw.Draw(Image.new("RGB", (1, 1))).textlength(name) for name in names))
    size = len(classes) * _CELL
    image = Image.new("RGB", (left + size, _CELL + size), _WHITE)
    draw = ImageDraw.Draw(image)
    for row, counts in enumerate(matrix):
        top = _CELL * (row + 1)
        draw.text((5, top + _CELL // 2), names[row], _BLACK, anchor="lm")
        draw.text((left + _CELL * row + _CELL // 2, _CELL // 2), str(row), _BLACK, anchor="mm")
        for column, count in enumerate(counts):
            x, fraction = left + _CELL * column, count / max(1, sum(counts))
            draw.rectangle((x, top, x + _CELL - 2, top + _CELL - 2), _blend(fraction))
            if count:
                color = _WHITE if fraction > 0.5 else _BLACK
                draw.text((x + _CELL // 2, top + _CELL // 2), str(count), color, anchor="mm")
    return image


def draw_mistakes(evaluation: dict[str, Any]) -> Image.Image:
    """Draw the images of the mistakes in a grid, each above its classes and its probability."""
    mistakes = evaluation["mistakes"]
    rows = max(1, -(-len(mistakes) // _COLUMNS))
    image = Image.new("RGB", (_COLUMNS * (_TILE + 4), rows * (_TILE + _CAPTION + 4)), _WHITE)
    draw = ImageDraw.Draw(image)
    for number, mistake in enumerate(mistakes):
        x, y = number % _COLUMNS * (_TILE + 4), number // _COLUMNS * (_TILE + _CAPTION + 4)
        tile = decode_image(mistake).convert("RGB").resize((_TILE, _TILE), Image.Resampling.NEAREST)
        image.paste(tile, (x, y))
        draw.text((x, y + _TILE), describe_mistake(mistake, evaluation["classes"]), _BLACK, spacing=2)
    return image


def _blend(fraction: float) -> tuple[int, ...]:
    """Return the color between white, for zero, and blue, for one."""
    return tuple(round(white + fraction * (blue - white)) for white, blue in zip(_WHITE, _BLUE, strict=True))


def wandb_media(stage: str, evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return what `wandb.log` takes for an evaluation of `src/callbacks/evaluation.py`; stage is val or test."""
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
