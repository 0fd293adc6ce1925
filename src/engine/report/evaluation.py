"""What the newest evaluation of a split shows: confusion matrix and accuracy of each class."""

from typing import Any

import numpy as np
from markupsafe import Markup

from src.engine.report.page import CATEGORIES, Section, chart, new_figure, parts
from src.engine.report.run_folder import Floats

_SPLIT_NAMES = {"test": "Test", "val": "Validation"}
_HEAT = [[stop, f"var(--heat{index})"] for index, stop in enumerate((0, 0.08, 0.35, 0.7, 1))]
_MOST_CLASSES = 200  # of a matrix; that of a thousand is 20 MB, and its cells are smaller than a pixel
_MOST_LABELED = 20  # classes of a matrix whose cells have room for a number


def evaluation_section(split: str, evaluation: dict[str, Any]) -> Section:
    """Return the section of one split; what its file lacks is left out."""
    classes = [str(name) for name in evaluation.get("classes") or []]
    confusion = np.array(evaluation.get("confusion") or [], dtype=np.float64)
    charts = []
    if confusion.ndim == 2 and confusion.shape == (len(classes), len(classes)) and confusion.sum():
        charts += [_confusion_chart(confusion, classes)] if len(classes) <= _MOST_CLASSES else []
        charts.append(_class_chart(confusion, classes))
    step = evaluation.get("step")
    note = f"The newest evaluation, at step {step:,}." if isinstance(step, int) else ""
    return Section(f"{_SPLIT_NAMES.get(split, split)} set", parts.grid(charts, "narrow"), note)


def _confusion_chart(confusion: Floats, classes: list[str]) -> Markup:
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    few = len(classes) <= _MOST_LABELED
    figure = new_figure(400, hovermode="closest")
    figure.add_heatmap(
        z=share,
        customdata=confusion,
        x=classes,
        y=classes,
        zmin=0,
        zmax=1,
        colorscale=_HEAT,
        showscale=False,
        xgap=1 if few else 0,
        ygap=1 if few else 0,
        text=[[f"{count:,.0f}" if count else "" for count in row] for row in confusion] if few else None,
        texttemplate="%{text}" if few else None,
        textfont={"size": 11},
        hovertemplate="%{y} taken for %{x}: %{customdata:,.0f} (%{z:.1%})<extra></extra>",
    )
    axis = {"type": "category", "showgrid": False, "showticklabels": len(classes) < 40}
    figure.update_xaxes(axis | {"title": "predicted", "tickangle": -45})
    figure.update_yaxes(axis | {"title": "true", "autorange": "reversed"})
    total = f"{confusion.sum():,.0f} images, {np.trace(confusion) / confusion.sum():.2%} of them right"
    return chart(figure, "Confusion matrix", f"{total}. Shades are fractions of a row.")


def _class_chart(confusion: Floats, classes: list[str]) -> Markup:
    """Return the accuracy of each class, the lowest on top; of many classes, the twenty lowest."""
    counts = confusion.sum(axis=1)
    seen = np.flatnonzero(counts)
    accuracy = np.diag(confusion) / np.maximum(counts, 1)
    order = seen[np.argsort(accuracy[seen])][:_MOST_LABELED]
    names, values = [classes[index] for index in order], accuracy[order]
    figure = new_figure(400, hovermode=False, bargap=0.35, yaxis=CATEGORIES)
    figure.add_bar(
        x=values,
        y=names,
        orientation="h",
        marker={"color": "var(--s1)", "cornerradius": 3},
        text=[f"{value:.1%}" for value in values],
        textposition="outside",
        textfont={"color": "var(--ink)"},
        cliponaxis=False,
    )
    figure.update_xaxes(range=[0, 1.15], tickvals=[0, 0.5, 1], tickformat=".0%")
    left_out = f" The {len(order)} lowest of {len(seen)}." if len(order) < len(seen) else ""
    return chart(figure, "Accuracy of each class", f"The lowest first.{left_out}")
