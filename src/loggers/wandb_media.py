"""An evaluation as objects of wandb: charts, a table and images."""

from typing import Any

from src.loggers.evaluation_images import draw_mistakes


def evaluation_media(stage: str, evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return what `wandb.log` takes for an evaluation of `src/callbacks/evaluation.py`; stage is val or test."""
    import wandb

    return {
        f"images/{stage}_confusion_matrix": _confusion_chart(stage, evaluation),
        f"images/{stage}_calibration": _calibration_chart(stage, evaluation),
        f"images/{stage}_class_accuracy": _class_table(evaluation),
        # One image of all mistakes: 64 files of each validation would be thousands in a long run.
        f"images/{stage}_mistakes": wandb.Image(draw_mistakes(evaluation)),
    }


def _confusion_chart(stage: str, evaluation: dict[str, Any]) -> Any:
    """Return the chart of `wandb.plot.confusion_matrix`, which itself takes single predictions instead of counts."""
    import wandb

    classes, columns = evaluation["classes"], ("Actual", "Predicted", "nPredictions")
    rows = [
        [classes[label], classes[predicted], count]
        for label, counts in enumerate(evaluation["confusion"])
        for predicted, count in enumerate(counts)
    ]
    table = wandb.Table(columns=list(columns), data=rows)
    title = {"title": f"Confusion matrix, {stage}"}
    return wandb.plot_table("wandb/confusion_matrix/v1", table, dict(zip(columns, columns, strict=True)), title)


def _calibration_chart(stage: str, evaluation: dict[str, Any]) -> Any:
    import wandb

    bins = [row for row in evaluation["calibration"]["bins"] if row["count"]]
    confidence, accuracy = ([row[key] for row in bins] for key in ("confidence", "accuracy"))
    return wandb.plot.line_series(
        xs=confidence,
        ys=[accuracy, confidence],
        keys=["accuracy", "perfect calibration"],
        title=f"Calibration, {stage}",
        xname="probability",
    )


def _class_table(evaluation: dict[str, Any]) -> Any:
    import wandb

    rows = []
    for label, (name, counts) in enumerate(zip(evaluation["classes"], evaluation["confusion"], strict=True)):
        rows.append([name, sum(counts), counts[label] / sum(counts) if sum(counts) else None])
    return wandb.Table(columns=["class", "samples", "accuracy"], data=rows)
