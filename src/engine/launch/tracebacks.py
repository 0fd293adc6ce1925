"""The traceback of an error in the user's code: short on the terminal, whole in the log of the rank."""

import contextlib
import re
import sysconfig
import traceback

from src.engine.config.folder import PROJECT
from src.engine.utils.rank_log import log_file

_LIBRARIES = rf".*(?:site|dist)-packages/|{re.escape(sysconfig.get_path('stdlib'))}/|<"
_OWN = rf"(?:{re.escape(str(PROJECT))}/)?(?:src/engine/|train\.py)"
_FOLDED_FRAMES = re.compile(rf'(?:  File "(?:{_LIBRARIES}|{_OWN}).*\n(?:(?!  File ) .*\n)*)+')


def append_traceback(error: Exception, run_dir: str, rank: int) -> None:
    """Append the whole traceback to the log of a rank."""
    log = log_file(run_dir, rank)
    with contextlib.suppress(OSError):  # such as a full disk, which must not hide the error
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            traceback.print_exception(error, file=file)


def fold_frames(trace: str) -> str:
    """Return the text of tracebacks with one line for successive frames of libraries and of src/engine.

    A text without a frame of the user's files is returned as it is: the error is a bug of the template.
    """
    folded = _FOLDED_FRAMES.sub(_summary, trace)
    return folded if '\n  File "' in folded else trace


def _summary(frames: re.Match[str]) -> str:
    files = re.findall(r'^  File "(.+)", line', frames[0], re.MULTILINE)
    names = {name for file in files for name in re.findall(r"(?<=-packages/)\w+|src/engine(?=/)", file)} or {"Python"}
    return f"  ... {len(files)} frame{'s' * (len(files) > 1)} of {', '.join(sorted(names))} ...\n"
