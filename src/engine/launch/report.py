"""Write the page of a run or a sweep automatically, without ever changing how the run ends."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig

from src.engine.state.jobs import is_sweep


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
        # Here, so that a template without src/engine/report trains as well.
        from src.engine.report import write_page_of

        write_page_of(folder)
    except ModuleNotFoundError as error:
        print(f"no report.html: {error}; set report=false", file=sys.stderr)
    except Exception as error:  # a run must not fail, nor lose its own error, because of its report
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"warning: no report.html ({reason}); try python -m scripts.report {folder}", file=sys.stderr)
