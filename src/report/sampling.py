"""Fewer points of long curves, for pages that open at once."""

import numpy as np

from src.report.files import Curve, Floats

BUCKETS = 600  # of a long curve, each with its smallest and its largest value; a chart is some 600 pixels wide


def downsample(curve: Curve, buckets: int = BUCKETS) -> Curve:
    """Return the curve with the smallest and the largest value of each bucket, so that every spike stays visible.

    A curve of at most two points per bucket is returned as it is, but for infinite values, which become nan.
    """
    values = np.where(np.isfinite(curve.values), curve.values, np.nan)
    if len(values) <= 2 * buckets:
        return Curve(curve.steps, values)
    rows = _rows(values, buckets)
    first = np.arange(len(rows)) * rows.shape[1]
    lowest = first + np.where(np.isnan(rows), np.inf, rows).argmin(axis=1)
    highest = first + np.where(np.isnan(rows), -np.inf, rows).argmax(axis=1)
    kept = np.unique(np.concatenate([[0], lowest, highest, [len(values) - 1]]))
    return Curve(curve.steps[kept], values[kept])


def means(curve: Curve, buckets: int) -> Curve:
    """Return the mean step and the mean of the finite values of each bucket; nan if there is none."""
    values = _rows(np.where(np.isfinite(curve.values), curve.values, np.nan), buckets)
    counts = np.isfinite(values).sum(axis=1)
    sums = np.nansum(values, axis=1)
    steps = np.nanmean(_rows(curve.steps, buckets), axis=1)
    return Curve(steps, np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))


def _rows(values: Floats, buckets: int) -> Floats:
    """Return the values in at most so many rows: (rows, values per bucket), the last row filled with nan."""
    size = -(-len(values) // buckets)
    rows = np.full((-(-len(values) // size), size), np.nan)
    rows.flat[: len(values)] = values
    return rows
