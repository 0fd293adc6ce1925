"""What a run gives to the process that has started it: in a notebook `train` returns it."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecurve.records.files import METRICS

if TYPE_CHECKING:
    import lightning as L

_COLUMN_TYPES = {"step": int, "epoch": int}  # of metrics.csv; all others are float


@dataclass(frozen=True)
class Result:
    """The outcome of a run on rank zero.

    Attributes:
        metrics: last value of each metric, by name.
        folder: the run folder, from which `load_run` reads the network.
        trainer: Lightning's trainer, with its `lightning_module` and `datamodule`; None if the ranks were other
            processes.
    """

    metrics: dict[str, float]
    folder: Path
    trainer: "L.Trainer | None" = None

    @property
    def history(self) -> list[dict[str, float]]:
        """The rows of metrics.csv, each without its empty cells; `pandas.DataFrame` takes them."""
        with (self.folder / METRICS).open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        return [{name: _COLUMN_TYPES.get(name, float)(cell) for name, cell in row.items() if cell} for row in rows]

    def __reduce__(self) -> Any:
        """Leave the trainer out, also of a copy: it stays in the process of its rank."""
        return Result, (self.metrics, self.folder)
