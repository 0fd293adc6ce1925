"""Run the Hydra application, and report an error as one line that names the option and a solution."""

import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
import yaml
from dotenv import load_dotenv
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.engine.config.folder import CONF, PROJECT
from src.engine.config.shorthands import complete_overrides
from src.engine.utils.errors import UserError, nearest_options, suggest
from src.engine.utils.overrides import flatten_config

_FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own variable: with 1, every error keeps its traceback
# torch warns on macOS, in each process, that it does not redirect output, which nothing here asks for.
logging.getLogger("torch.distributed.elastic.multiprocessing.redirects").setLevel(logging.ERROR)
TRACEBACK_WANTED = os.environ.get(_FULL_ERROR) == "1"


def run_application(main: Callable[[], None]) -> int:
    """Run a Hydra application and return the process's exit code."""
    load_dotenv(PROJECT / ".env")
    before = os.environ.get(_FULL_ERROR, "")
    os.environ[_FULL_ERROR] = "1"  # makes Hydra raise every exception, so that this function can handle it
    try:
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


@contextmanager
def errors_explained(words: Sequence[str]) -> Iterator[None]:
    """Turn what Hydra raises because of these overrides, or of a file in conf/, into a UserError of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.MarkedYAMLError) as error:
        raise UserError(_explain(error, words)) from error


def _explain(error: Exception, words: Sequence[str]) -> str:
    """Return an error of Hydra as one line, with similar names for an unknown one on the command line."""
    cause: BaseException | None = error
    while cause := cause and (cause.__cause__ or cause.__context__):
        if isinstance(cause, UserError):  # of a resolver
            return str(cause)
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        choices = error.options or [file.stem for file in (CONF / group).glob("*.yaml")]  # Hydra has none for a list
        return f"{group}={name}: {suggest(name, [choice for choice in choices if not choice.startswith('_')])}"
    # Hydra gives the name of an unknown option in its message only (`_apply_overrides_to_config` in
    # https://github.com/facebookresearch/hydra/blob/v1.3.2/hydra/_internal/config_loader_impl.py).
    if unknown := re.match(r"Could not (?:override|delete from config\.) '([\w.]+)'", str(error)):
        hint = nearest_options(unknown[1], _names_of_options(words))
        return f"{unknown[1]} is no option here; {hint} (+{unknown[1]}=... adds it to the configuration)"
    line = " ".join(str(error).split())
    return f"{error.override}: {line}" if isinstance(error, OverrideParseException) else line


def _names_of_options(words: Sequence[str]) -> set[str]:
    """Return the groups, and the options of the configuration that the groups on the command line choose."""
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    chosen = [word for word in words if (CONF / f"{word.replace('=', '/')}.yaml").is_file()]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed: Any = OmegaConf.to_container(hydra.compose("train", chosen))
    return groups | {name for name in flatten_config(composed) if not re.match(r"runtime\b|.*\b_", name)}
