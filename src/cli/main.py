"""Run the Hydra application, and report an error as one line that names the option and a solution."""

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from src.cli.shorthands import (
    missing_folder,
    with_found_runs,
    with_saved_overrides,
    with_saved_sweep,
    without_null_choices,
)
from src.utils.errors import UserError, similar_names, suggest
from src.utils.flatten import flatten_config

_PROJECT = Path(__file__).parents[2]
_CONF = _PROJECT / "conf"
_FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own variable: with 1, every error keeps its traceback
TRACEBACK_WANTED = os.environ.get(_FULL_ERROR) == "1"


def run_application(main: Callable[[], None]) -> int:
    """Run a Hydra application and return the process's exit code."""
    _load_env_file(_PROJECT / ".env")
    try:
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
        return _fail(explain(error))
    except OSError as error:
        option = missing_folder(sys.argv)
        if option is None:
            raise
        return _fail(f"{option}: cannot make that folder ({error.strerror}): give another")
    finally:
        del os.environ[_FULL_ERROR]
    return 0


def _load_env_file(file: Path) -> None:
    """Set the environment variables of the file, if it exists. Variables that are set already keep their values."""
    if file.is_file():
        from dotenv import load_dotenv

        load_dotenv(file)


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


def explain(error: Exception) -> str:
    """Return Hydra's message as one line, with a hint which names exist."""
    if cause := _user_error(error):  # a resolver in conf/train.yaml raised it
        return str(cause)
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        return _explain_choice(*str(error.missing_cfg_file).rsplit("/", 1))
    message = str(error).splitlines()[0]
    # Hydra gives the name of the option in its message only: _apply_overrides_to_config in
    # https://github.com/facebookresearch/hydra/blob/v1.3.2/hydra/_internal/config_loader_impl.py
    if unknown := re.match(r"Could not override '([\w.]+)'", message):
        return _explain_option(unknown[1])
    return f"{message} {error.__cause__}".splitlines()[0] if error.__cause__ else message


def _user_error(error: BaseException | None) -> UserError | None:
    """Return the first UserError among the error and its contexts, or None."""
    while error is not None and not isinstance(error, UserError):
        error = error.__context__
    return error


def _explain_choice(group: str, name: str) -> str:
    if group.startswith("hydra/"):
        return f"{group}={name}: not installed here; it comes with pip install '.[sweeps]'"
    choices = [file.stem for file in (_CONF / group).glob("[!_]*.yaml")]
    return f"{group}={name}: there is no {name} in conf/{group}; {suggest(name, choices)}"


def _explain_option(option: str) -> str:
    options = _options()
    names = sorted(name for name in options if name.endswith(f".{option}")) or similar_names(option, options)
    hint = f"did you mean {' or '.join(names)}?" if names else "python train.py --cfg job lists all"
    return f"{option} is no option here; {hint} (+{option}=... passes it on anyway)"


def _options() -> set[str]:
    """Return the names of the options in the files under conf/, as the command line spells them."""
    names: set[str] = set()
    for file in _CONF.glob("**/*.yaml"):
        text = file.read_text()
        package = re.match(r"# @package (\S+)", text)
        prefix = package[1] if package else str(file.parent.relative_to(_CONF))
        names |= flatten_config(yaml.safe_load(text) or {}, prefix.replace("_global_", "").strip(".")).keys()
    internal = re.compile(r"(hydra|runtime)\b|.*\bdefaults$|.*\b_")
    return {name for name in names if not internal.match(name)}
