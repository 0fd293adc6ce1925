"""Write the page of a run or a sweep automatically, without ever changing how the run ends."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig

from src.engine.report.jobs import JOB_FILE, is_sweep


@contextmanager
def run_report(cfg: DictConfig) -> Iterator[None]:
    """Write the page of a run when it ends, however it ends; and when it continues, as a kill may have ended it."""
    is_wanted, folder = cfg.report and not cfg.doctor, Path(cfg.run_dir)
    if is_wanted and find_spec("plotly"):  # without it, the end says so
        write_if_possible(folder)
    try:
        yield
    finally:
        if is_wanted:
            write_if_possible(folder)


def write_if_possible(folder: Path) -> None:
    """Write the page of a sweep, or of a run that has logged anything; print one line if that is not possible."""
    try:
        if not is_sweep(folder) and not (folder / "metrics.csv").is_file():
            return
        if not find_spec("plotly"):
            print("no report.html: it needs plotly, which pip install '.[report]' adds", file=sys.stderr)
            return
        write_page_of(folder)
    except Exception as error:  # a run must not fail, nor lose its own error, because of its report
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"warning: no report.html ({reason}); try python -m scripts.report {folder}", file=sys.stderr)


def write_page_of(folder: Path, *, single_file: bool = False) -> Path:
    """Write the page of a run or a sweep; return its path.

    Args:
        folder: the folder of the run or sweep.
        single_file: whether Plotly's JavaScript is inside the page, not beside all run folders.
    """
    from src.engine.report.run_page import write_run_page
    from src.engine.report.sweep_page import write_sweep_page

    folder = Path(os.path.abspath(folder))
    is_job = (folder / JOB_FILE).is_file()
    scripts = None if single_file else folder.parent.parent if is_job else folder.parent
    return write_sweep_page(folder, scripts) if is_sweep(folder) else write_run_page(folder, scripts)
