"""HTML reports of run folders: one run, a sweep, several runs. They read files only, and load nothing from outside."""

import os
from pathlib import Path

from onecurve.extras.jobs import JOB_FILE, is_sweep


def write_page_of(folder: Path, *, single_file: bool = False) -> Path:
    """Write the page of a run or a sweep; return its path.

    With `single_file` Plotly's JavaScript is inside the page, not beside all run folders.
    """
    from onecurve.extras.report.run_page import write_run_page  # late: scripts.compare needs no Jinja
    from onecurve.extras.report.sweep_page import write_sweep_page

    folder = Path(os.path.abspath(folder))
    is_job = (folder / JOB_FILE).is_file()
    scripts = None if single_file else folder.parent.parent if is_job else folder.parent
    return write_sweep_page(folder, scripts) if is_sweep(folder) else write_run_page(folder, scripts)
