"""Private names of Lightning's RichProgressBar, and of rich 14, for the layout of the columns."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from rich.table import Column


def set_layout(column: Any, layout: Column) -> None:
    """Set the layout of a column that Lightning has made; the constructor of rich takes it, Lightning's do not."""
    column._table_column = layout


class ProgressBarWithLayout(RichProgressBar):
    """Lightning's RichProgressBar, whose column of metrics is laid out for the width of the terminal."""

    def _init_progress(self, trainer: L.Trainer) -> None:
        super()._init_progress(trainer)
        if self._metric_component is not None and self._console is not None:
            set_layout(self._metric_component, self.layout_of_metrics(self._console.width))

    def layout_of_metrics(self, width: int) -> Column:
        """Return the layout of the column of metrics, in a terminal of `width` characters."""
        return Column()
