"""The process of one case: `child NAME RESULT ACCELERATOR DEVICES FOLDER` writes the outcome as JSON."""

import json
import sys
import traceback
from pathlib import Path

from scripts.dev.gpu_check.case import CheckFailedError, NotHere, Session
from scripts.dev.gpu_check.cases import cases
from scripts.dev.shared.process import exit_on_sigterm


def main() -> None:
    exit_on_sigterm()
    name, result, accelerator, devices, folder = sys.argv[1:]
    session = Session(accelerator, int(devices), Path(folder))
    (case,) = [case for case in cases(session) if case.name == name]
    try:
        outcome = ("ok", case.check(session))
    except NotHere as reason:
        outcome = ("not here", str(reason))
    except CheckFailedError as error:
        outcome = ("FAILED", str(error))
    except Exception as error:
        traceback.print_exc()
        outcome = ("FAILED", f"{type(error).__name__}: {error}")
    Path(result).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
