"""Write the HTML page of a run or of a sweep, or the comparison of several runs.

RUN_DIR is a run folder, or the folder of a sweep; the page is its report.html. Several run folders give a comparison
with the first of them; files among them, as in `runs/*`, are left out. A page loads nothing from outside: Plotly's
JavaScript is written once beside the run folders, or with --single-file into the page.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from onecurve.errors import UserError
from onecurve.extras.jobs import is_sweep
from onecurve.extras.report import write_page_of


def write(folders: list[Path], output: Path | None, single_file: bool) -> Path:
    """Write the page for the folders; return its path.

    Raises:
        UserError: if plotly is not installed, a folder is no run or sweep, or `output` is given for one folder.
    """
    if not find_spec("plotly"):
        raise UserError("the report needs plotly: pip install '.[report]'")
    folders = [folder for folder in folders if not folder.is_file()] or folders
    for folder in folders:
        if is_sweep(folder) and len(folders) > 1:
            raise UserError(f"{folder} is a sweep: give it alone, or its run folders")
        if not is_sweep(folder) and not any((folder / name).is_file() for name in ("metrics.csv", "events.jsonl")):
            raise UserError(f"{folder} is no run folder: it has no metrics.csv")
    if len(folders) == 1:
        if output:
            raise UserError(f"--output={output} is for a comparison, of several run folders")
        return write_page_of(folders[0], single_file=single_file)
    return _write_comparison(folders, output, single_file)


def _write_comparison(folders: list[Path], output: Path | None, single_file: bool) -> Path:
    from onecurve.extras.report.comparison import write_comparison
    from onecurve.extras.report.run_folder import RunFolder

    runs = [RunFolder(folder) for folder in folders]
    file = (output or runs[0].path.parent / "comparison.html").absolute()
    if not file.parent.is_dir():
        raise UserError(f"--output={file}: there is no folder {file.parent}")
    try:
        write_comparison(runs, file, None if single_file else file.parent)
    except OSError as error:
        raise UserError(f"--output={file} cannot be written ({error.strerror}): give another file") from None
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_DIR", help="run folders, or a sweep")
    parser.add_argument("--output", type=Path, help="file of a comparison (default: beside the first run)")
    parser.add_argument("--single-file", action="store_true", help="put Plotly's JavaScript (5 MB) into the page")
    arguments = parser.parse_args()
    try:
        print(write(arguments.folders, arguments.output, arguments.single_file))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
