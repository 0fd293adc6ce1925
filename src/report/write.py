"""Write the page of a run or a sweep automatically, without ever changing how the run ends."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from src.report.jobs import JOB_FILE

_log = logging.getLogger(__name__)
_METRICS = "metrics.csv"


@contextmanager
def run_report(folder: str | Path, wanted: bool) -> Iterator[None]:
    """Write the page of a run when it ends, however it ends; and before it continues, that of what it did until then.

    A process that was killed could not write its page, so its next start does.

    Args:
        folder: the run folder.
        wanted: whether this process writes the page; one process of a run does.
    """
    if wanted:
        write_run_report(Path(folder))
    try:
        yield
    finally:
        if wanted:
            write_run_report(Path(folder))


def write_run_report(folder: Path) -> None:
    """Write the page of a run, if the run has logged anything; print one line if that fails."""
    if (folder / _METRICS).is_file():
        _write(folder, lambda: _write_run(folder))


def write_sweep_report(folder: Path) -> None:
    """Write the page of a sweep; print one line if that fails."""
    _write(folder, lambda: _write_sweep(folder))


def scripts_folder(folder: Path) -> Path:
    """Return the folder of Plotly's JavaScript for the page of a run or a sweep: the one that holds all runs."""
    is_job = (folder / JOB_FILE).is_file()
    return folder.parent.parent if is_job else folder.parent


def _write(folder: Path, write: Callable[[], Path]) -> None:
    if not find_spec("plotly"):
        _log.info("no report.html: it needs plotly, which pip install '.[report]' adds")
        return
    try:
        write()
    except Exception as error:  # a run must not fail, nor lose its own error, because of its report
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        command = f"python -m scripts.report {folder}"
        print(f"warning: no report.html ({reason}); {command} repeats the attempt", file=sys.stderr)


def _write_run(folder: Path) -> Path:
    from src.report.run_page import write_run_page

    return write_run_page(folder, scripts_folder(folder))


def _write_sweep(folder: Path) -> Path:
    from src.report.sweep_page import write_sweep_page

    return write_sweep_page(folder, scripts_folder(folder))
