"""The CSV logger of every run: `metrics.csv` has one row per logged step, and a resumed run continues it."""

import csv
import logging
import os
from argparse import Namespace
from bisect import bisect_right
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers.logger import DummyExperiment, Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from onecurve.records.files import CONFIG, METRICS, atomic_write, is_of_test

_log = logging.getLogger(__name__)


class CSVLogger(Logger):
    """Logger that writes `config.yaml` and `metrics.csv` to the run folder.

    Lightning's CSVLogger deletes the file when it opens a folder again. This one continues the file and merges the
    metrics of one step into one row; only a second test has a row of its own. Where it cannot append, it replaces the
    file atomically.
    """

    version = ""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.file = folder, folder / METRICS
        self._rows: list[dict[str, Any]] | None = None
        self._columns = ["step", "epoch"]
        self._lacks_rows = False  # whether the last write failed
        self._has_old_lines = False  # whether the file still has rows that were cut, or a truncated line

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def experiment(self) -> DummyExperiment:
        """An object that takes and ignores all calls, such as those of a module for TensorBoard with logger=none."""
        return DummyExperiment()

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    log_dir = save_dir  # in which a module may write files of its own, as with the loggers of Lightning

    @property
    def has_config(self) -> bool:
        """Whether the configuration of a run is there already."""
        return (self.folder / CONFIG).exists()

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Write the resolved configuration, from which the run can be resumed.

        Checkpoints have the hyper-parameters that a module saves.
        """
        if "runtime" not in params:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.folder / CONFIG) as temporary:
            temporary.write_text(yaml.safe_dump(params, sort_keys=False))

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add metrics to the row of their step, or a row; a module may call this without a step, for the last row."""
        rows = self._read()
        if step is None:
            step = rows[-1]["step"] if rows else 0
        metrics = {name: one.tolist() if isinstance(one, Tensor) else one for name, one in metrics.items()}
        row = {"step": step} | metrics
        place = bisect_right(rows, step, key=itemgetter("step"))  # behind the rows of this step and of earlier ones
        known = rows[place - 1] if place and rows[place - 1]["step"] == step else None
        if known is None or _is_second_test(known, metrics):
            rows.insert(place, row)
        else:
            known.update(row)
        can_append = rows[-1] is row and set(row) <= set(self._columns)
        self._columns += [name for name in row if name not in self._columns]
        self._write(row if can_append else None)

    @rank_zero_only
    def cut(self, step: int) -> None:
        """Remove the rows from `step` on, because a resumed run trains these steps again.

        The file keeps them until the next row is logged: the first step may be refused.
        """
        rows = self._read()
        self._rows = [row for row in rows if row["step"] < step]
        self._has_old_lines |= len(self._rows) < len(rows)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Sync the rows, as the checkpoint is synced: a run goes on from it with these, also if the machine fails."""
        with suppress(OSError), self.file.open("rb") as stream:
            os.fsync(stream.fileno())

    def _read(self) -> list[dict[str, Any]]:
        """Return the rows; the first call reads those of an earlier process, without a truncated last line."""
        if self._rows is None:
            text = self.file.read_text() if self.file.exists() else ""
            complete = text[: text.rfind("\n") + 1]  # a killed process may have written half a line
            reader = csv.DictReader(complete.splitlines())
            self._columns = list(reader.fieldnames or self._columns)
            logged = [{name: value for name, value in row.items() if value} for row in reader if row["step"]]
            self._rows = [row | {"step": int(row["step"])} for row in logged]
            self._has_old_lines |= complete != text
        return self._rows

    def _write(self, last: dict[str, Any] | None) -> None:
        """Append the last row, if it is given and the file has all others; otherwise replace the file."""
        try:
            if last and self.file.exists() and not (self._lacks_rows or self._has_old_lines):
                with self.file.open("a", newline="") as stream:
                    self._writer(stream).writerow(last)
            else:
                with atomic_write(self.file) as temporary, temporary.open("w", newline="") as stream:
                    writer = self._writer(stream)
                    writer.writeheader()
                    writer.writerows(self._rows or [])
            self._lacks_rows = self._has_old_lines = False
        except OSError as error:  # such as a full disk
            if not self._lacks_rows:
                _log.warning("%s lacks rows until it can be written; training continues: %s", self.file.name, error)
            self._lacks_rows = True

    def _writer(self, stream: Any) -> Any:
        return csv.DictWriter(stream, self._columns, lineterminator=os.linesep)


def _is_second_test(row: dict[str, Any], metrics: dict[str, float]) -> bool:
    """Return whether metrics are of another test than those in a row of their step, such as that of other data."""
    tests = [name for name in metrics if is_of_test(name)]
    return any(str(row.get(name, metrics[name])) != str(metrics[name]) for name in tests)
