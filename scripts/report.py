"""Write the HTML page of a run or of a sweep, or the comparison of several runs.

RUN_DIR is a run folder, whose page is its report.html; or the folder of a sweep. Several run folders give a comparison
with the first of them. A page loads nothing from outside: Plotly's JavaScript is written once beside the run folders,
or with --single-file into the page.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from src.report.jobs import JOB_FILE
from src.report.write import scripts_folder
from src.utils.errors import UserError


def write(folders: list[Path], output: Path | None, single_file: bool) -> Path:
    """Write the page for the folders; return its path.

    Raises:
        UserError: if plotly is not installed, a folder is no run or sweep, or --output is given for a single one.
    """
    if not find_spec("plotly"):
        raise UserError("the report needs plotly: pip install '.[report]'")
    for folder in folders:
        _check(folder, allow_sweep=len(folders) == 1)
    if len(folders) > 1:
        return _write_comparison(folders, output or Path("comparison.html"), single_file)
    if output:
        raise UserError(f"--output={output} is for several runs: the page of one is report.html in its folder")
    folder = folders[0].absolute()
    scripts = None if single_file else scripts_folder(folder)
    if _is_sweep(folder):
        from src.report.sweep_page import write_sweep_page

        return write_sweep_page(folder, scripts)
    from src.report.run_page import write_run_page

    return write_run_page(folder, scripts)


def _check(folder: Path, allow_sweep: bool) -> None:
    if (folder / "metrics.csv").is_file() or (folder / "events.jsonl").is_file():
        return
    if not _is_sweep(folder):
        raise UserError(f"{folder} is no run folder: it has no metrics.csv")
    if not allow_sweep:
        raise UserError(f"{folder} is a sweep: give it alone, or its run folders")


def _is_sweep(folder: Path) -> bool:
    return any(folder.glob(f"*/{JOB_FILE}"))


def _write_comparison(folders: list[Path], file: Path, single_file: bool) -> Path:
    from src.report.comparison import write_comparison
    from src.report.run_folder import RunFolder

    file = file.absolute()
    if not file.parent.is_dir():
        raise UserError(f"--output={file}: the folder {file.parent} does not exist")
    write_comparison([RunFolder(folder) for folder in folders], file, None if single_file else file.parent)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN_DIR", help="run folders, or the folder of a sweep"
    )
    parser.add_argument("--output", type=Path, help="the file of a comparison (default: comparison.html)")
    parser.add_argument("--single-file", action="store_true", help="put Plotly's JavaScript (5 MB) into the page")
    arguments = parser.parse_args()
    try:
        print(write(arguments.folders, arguments.output, arguments.single_file))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
