"""Run the Hydra application, and report an error as one line that names the option and a solution."""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable

from dotenv import load_dotenv
from hydra._internal.utils import get_args_parser

from src.engine.config.folder import COMMAND, PROJECT
from src.engine.config.messages import errors_explained
from src.engine.config.shorthands import complete_overrides
from src.engine.utils.errors import UserError

_FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own variable: with 1, every error keeps its traceback
# torch warns on macOS, in each process, that it does not redirect output, which nothing here asks for.
logging.getLogger("torch.distributed.elastic.multiprocessing.redirects").setLevel(logging.ERROR)
TRACEBACK_WANTED = os.environ.get(_FULL_ERROR) == "1"


def run_application(main: Callable[[], None]) -> int:
    """Run a Hydra application and return the process's exit code."""
    load_dotenv(PROJECT / ".env")
    os.environ[COMMAND] = json.dumps(["python", *sys.argv])  # before short forms are completed
    before = os.environ.get(_FULL_ERROR, "")
    os.environ[_FULL_ERROR] = "1"  # makes Hydra raise every exception, so that this function can handle it
    try:
        _check_flags(sys.argv[1:])
        sys.argv = [sys.argv[0], *complete_overrides(sys.argv[1:])]
        with errors_explained(sys.argv[1:]):
            main()
    except UserError as error:
        if TRACEBACK_WANTED:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        os.environ[_FULL_ERROR] = before
    return 0


def _check_flags(words: list[str]) -> None:
    """Check the flags with Hydra's own parser, which would print its usage in many lines."""

    def refuse(message: str) -> None:
        raise UserError(f"{message}; write all options in front of the flags, and see python train.py --help")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign, assignment]
    parser.parse_args(words)
