"""Run the Hydra application, and report an error as one line that names the option and a solution."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from src.cli.shorthands import with_saved_overrides, with_saved_sweep, without_null_choices
from src.utils.errors import UserError, nearest

_CONF = Path(__file__).parents[2] / "conf"
_FULL = "HYDRA_FULL_ERROR"  # Hydra's own variable: with 1, every error keeps its traceback
TRACEBACK_WANTED = os.environ.get(_FULL) == "1"


def run(main: Callable[[], None]) -> int:
    """Run a Hydra application and return the process's exit code."""
    try:
        sys.argv = without_null_choices(with_saved_sweep(with_saved_overrides(_multirun_first(sys.argv))))
    except UserError as error:
        return _fail(str(error))
    if TRACEBACK_WANTED:
        main()
        return 0
    os.environ[_FULL] = "1"  # makes Hydra raise every exception, so that this function can handle it
    try:
        main()
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except (HydraException, OmegaConfBaseException) as error:
        return _fail(_explain(error))
    except OSError as error:
        # An error inside train.py's main keeps its traceback; any other comes from Hydra, which makes the run folder.
        if any(
            frame.name == "main" and frame.filename.endswith("train.py") for frame in extract_tb(error.__traceback__)
        ):
            raise
        return _fail(f"cannot make the run folder {error.filename} ({error.strerror}): set run_dir to another")
    finally:
        del os.environ[_FULL]
    return 0


def _multirun_first(argv: list[str]) -> list[str]:
    """Move `-m` in front of the overrides, because Hydra understands it only there."""
    flags = [word for word in argv if word in ("-m", "--multirun")]
    return [argv[0], *flags[:1], *(word for word in argv[1:] if word not in flags)]


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


def _explain(error: Exception) -> str:
    """Return Hydra's message as one line, with the names that are possible or similar."""
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if group.startswith("hydra/"):
            return f"{group}={name}: not installed here; it comes with pip install '.[sweeps]'"
        known = [file.stem for file in (_CONF / group).glob("[!_]*.yaml")]
        return f"{group}={name}: there is no {name} in conf/{group}; {nearest(name, known)}"
    text = str(error)
    if unknown := re.match(r"Could not override '([\w.]+)'", text):
        option = unknown[1]
        namesakes = sorted(name for name in _options() if name.endswith(f".{option}"))
        hint = f"did you mean {' or '.join(namesakes)}?" if namesakes else nearest(option, _options())
        return f"{option} is no option here; {hint} (+{option}=... passes it on all the same)"
    cause = f" {error.__cause__}".splitlines()[0] if error.__cause__ else ""
    return text.splitlines()[0] + cause


def _options() -> set[str]:
    """Return the names of the options in the files under conf/, as the command line spells them."""
    names = set(yaml.safe_load((_CONF / "train.yaml").read_text())) - {"defaults", "hydra"}
    for file in set(_CONF.glob("*/*.yaml")) - set(_CONF.glob("sweep/*")):
        text = file.read_text()
        package = re.match(r"# @package ([a-z]\S*)", text)
        prefix = package[1] if package else file.parent.name
        names |= {f"{prefix}.{key}" for key in yaml.safe_load(text) or {} if not key.startswith("_")}
    return names
