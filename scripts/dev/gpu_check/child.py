"""The process of one case: `python -m scripts.dev.gpu_check.child NAME RESULT SESSION` writes the outcome as JSON."""

import json
import sys
import traceback
from pathlib import Path

from scripts.dev.gpu_check.case import CheckFailedError, NotHere, Session
from scripts.dev.gpu_check.cases import cases
from scripts.dev.gpu_check.process import exit_on_sigterm


def main() -> None:
    exit_on_sigterm()
    name, result, session_json = sys.argv[1:]
    values = json.loads(session_json)
    peer = Path(values["peer"]) if values["peer"] else None
    session = Session(values["accelerator"], values["devices"], Path(values["folder"]), peer)
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
