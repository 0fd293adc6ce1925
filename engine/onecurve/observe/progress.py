"""A progress bar that fits a terminal of 80 columns, and costs nothing between its refreshes."""

from time import monotonic
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from rich import get_console
from rich.progress import TimeRemainingColumn
from rich.table import Column

from onecurve.process.signals import drop_lost_readers

_OTHER_COLUMNS = 38  # characters of all columns but the metrics, with a bar of 4


class ProgressBar(RichProgressBar):
    """Lightning's RichProgressBar on one line, with its metrics gathered at each of the `refresh_rate` refreshes.

    Lightning gathers them at every step, and also shows the elapsed time and the speed. The bar takes the room that the
    metrics leave. Metrics that do not fit are cut.
    """

    _refreshed_at = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *of_batch: Any) -> None:
        now, is_last = monotonic(), trainer.is_last_batch or trainer.global_step == trainer.max_steps
        if (now - self._refreshed_at >= 1 / self.refresh_rate or is_last) and not self.is_disabled:
            super().on_train_batch_end(trainer, pl_module, *of_batch)
            self._refreshed_at = now

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Return the metrics under short names, without the end of the run's id."""
        if self.progress is not None:  # their column is the last
            room = max(1, self.progress.console.width - _OTHER_COLUMNS)
            _set_layout(self.progress.columns[-1], Column(no_wrap=True, overflow="ellipsis", max_width=room))
        metrics = super().get_metrics(trainer, pl_module)
        return {name.removeprefix("train/"): value for name, value in metrics.items() if name != "v_num"}

    def configure_columns(self, trainer: L.Trainer) -> list[Any]:
        # If the reader of the output ends, as in `| head`, rich would end the process. Lightning makes a new console.
        get_console().on_broken_pipe = drop_lost_readers  # type: ignore[method-assign]
        description, bar, batches, *_ = super().configure_columns(trainer)
        bar.bar_width = None  # what the other columns leave
        columns = [description, batches, TimeRemainingColumn()]
        for column in columns:
            _set_layout(column, Column(no_wrap=True))
        return [description, bar, *columns[1:]]


def _set_layout(column: Any, layout: Column) -> None:
    """Set the layout of a column that Lightning has made: the constructor of rich takes it, Lightning's do not."""
    column.get_table_column = lambda: layout
