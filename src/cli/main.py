"""Run the Hydra application, and report an error as one line that names the option and a solution."""

import argparse
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from src.cli.messages import explain, explain_yaml
from src.cli.shorthands import (
    missing_folder,
    with_found_runs,
    with_saved_overrides,
    with_saved_sweep,
    without_null_choices,
)
from src.run.origin import keep_command
from src.utils.errors import UserError

_PROJECT = Path(__file__).parents[2]
_FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own variable: with 1, every error keeps its traceback
# torch warns on macOS, in each process, that it does not redirect output, which nothing here asks for.
logging.getLogger("torch.distributed.elastic.multiprocessing.redirects").setLevel(logging.ERROR)
TRACEBACK_WANTED = os.environ.get(_FULL_ERROR) == "1"


def run_application(main: Callable[[], None]) -> int:
    """Run a Hydra application and return the process's exit code."""
    try:
        _load_env_file(_PROJECT / ".env")
        keep_command(sys.argv)
        _check_flags(_multirun_first(sys.argv)[1:])
        refuse_internal_options(sys.argv[1:])
        argv = with_found_runs(_multirun_first(sys.argv))
        sys.argv = without_null_choices(with_saved_sweep(with_saved_overrides(argv)))
    except UserError as error:
        return _fail(str(error))
    if TRACEBACK_WANTED:
        main()
        return 0
    os.environ[_FULL_ERROR] = "1"  # makes Hydra raise every exception, so that this function can handle it
    try:
        main()
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except (HydraException, OmegaConfBaseException) as error:
        return _fail(explain(error, sys.argv[1:]))
    except yaml.MarkedYAMLError as error:
        return _fail(explain_yaml(error))
    except OSError as error:
        option = missing_folder(sys.argv)
        if option is None:
            raise
        return _fail(f"{option}: cannot make that folder ({error.strerror}): give another")
    finally:
        del os.environ[_FULL_ERROR]
    return 0


def _load_env_file(file: Path) -> None:
    """Set the environment variables of the file, if it exists. Variables that are set already keep their values.

    Raises:
        UserError: if a line is invalid; dotenv's warning does not name the file.
    """
    if file.is_file():
        from dotenv import load_dotenv
        from dotenv.parser import parse_stream

        with file.open() as stream:
            for binding in parse_stream(stream):
                if binding.error:
                    raise UserError(f"{file} line {binding.original.line} is not NAME=VALUE: correct it, or remove it")
        load_dotenv(file)


def _check_flags(words: list[str]) -> None:
    """Check the flags with Hydra's own parser, which would print its usage in many lines.

    Raises:
        UserError: if one is unknown or has an invalid value, or overrides stand on both sides of a flag.
    """
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        _, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see python train.py --help") from None
    if unknown and unknown[0].startswith("-"):
        raise UserError(f"{unknown[0]}: there is no such flag; see python train.py --help")
    if unknown:
        raise UserError(f"{unknown[0]}: write all options in front of the flags; see python train.py --help")


def refuse_internal_options(overrides: Sequence[str]) -> None:
    for word in overrides:
        if re.match(r"[+~]*runtime\b", word):
            raise UserError(f"{word}: the program sets `runtime` when a run starts; leave it out")
        if re.match(r"[+~]*hydra[./]job_logging\b", word):
            raise UserError(f"{word}: each rank logs to logs/rankN.log in the run folder; leave it out")


def _multirun_first(argv: list[str]) -> list[str]:
    """Move `-m` in front of the overrides, because Hydra understands it only there."""
    flags = [word for word in argv if word in ("-m", "--multirun")]
    return [argv[0], *flags[:1], *(word for word in argv[1:] if word not in flags)]


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1
