"""Say in one line what is wrong with a command that Hydra refuses, and which names exist."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.engine.config.folder import PROJECT
from src.engine.utils.errors import UserError, nearest_options, suggest
from src.engine.utils.overrides import flatten_config

CONF = PROJECT / "conf"
_ACCELERATORS = ("cpu", "gpu", "mps")
_OTHER_NAMES = {"train": "fit"}  # options of lightning-hydra-template
_EXTRA = [f"hydra/launcher={name}" for name in ("joblib", "submitit_local", "submitit_slurm")]  # of the extra `sweeps`


@contextmanager
def errors_explained(words: Sequence[str]) -> Iterator[None]:
    """Turn what Hydra raises because of these overrides, or of a file in conf/, into a UserError of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, words)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.name} line {mark.line + 1}" if mark else "a YAML file"
        hint = "check the indentation of this line and of those before it"
        raise UserError(f"{where} is no valid YAML ({error.problem}): {hint}") from error
    except OSError as error:  # Hydra could not make its folder
        option = next((word for word in words if word.startswith("hydra.") and f"{error.filename}" in word), None)
        if option is None:
            raise
        raise UserError(f"{option}: cannot make that folder ({error.strerror}): give another") from error


def explain(error: Exception, words: Sequence[str]) -> str:
    """Return an error of Hydra as one line.

    Args:
        error: the error.
        words: the command line without the name of the program.
    """
    if cause := _user_error(error):  # a resolver in conf/train.yaml raised it
        return str(cause)
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error.override, words)
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        return _explain_choice(str(error.missing_cfg_file), error.options)
    # Hydra gives the name of an unknown option in its message only (`_apply_overrides_to_config` in
    # https://github.com/facebookresearch/hydra/blob/v1.3.2/hydra/_internal/config_loader_impl.py).
    if unknown := re.match(r"Could not (?:override|delete from config\.) '([\w.]+)'", str(error)):
        return _explain_option(unknown[1], words)
    return " ".join(f"{error} {error.__cause__ or ''}".split()) or type(error).__name__


def _user_error(error: BaseException | None) -> UserError | None:
    """Return the first UserError among the error and its contexts, or None."""
    while error is not None and not isinstance(error, UserError):
        error = error.__context__
    return error


def _explain_syntax(word: str, words: Sequence[str]) -> str:
    index = words.index(word) if word in words else 0
    if index and words[index - 1].endswith("="):
        word = f"{words[index - 1]} {word}"
    if re.match(r"[^=\s]+=\S", word):
        return f"{word}: the value is not valid: close its brackets and quotes, and quote special characters"
    return f"{word}: write NAME=VALUE without a space around `=`, and quote lists and special characters"


def _explain_choice(path: str, options: Sequence[str] | None) -> str:
    group, _, name = path.rpartition("/")
    if f"{group}={name}" in _EXTRA:
        return f"{group}={name}: not installed here; it comes with pip install '.[sweeps]'"
    options = options or sorted(file.stem for file in (CONF / group).glob("*.yaml"))  # Hydra has none for a list
    choices = [choice for choice in options if not choice.startswith("_")]
    if not name:
        return f"{group}=: give one of {', '.join(choices)}"
    hint = suggest(name, choices)
    if group == "trainer" and name in _ACCELERATORS:
        hint = f"set trainer.accelerator={name}"
    elif others := sorted(file.parent.name for file in CONF.glob(f"*/{name}.yaml")):
        hint = f"did you mean {' or '.join(f'{other}={name}' for other in others)}?"
    return f"{group}={name}: there is no {name} in conf/{group}; {hint}"


def _explain_option(option: str, words: Sequence[str]) -> str:
    if known := _OTHER_NAMES.get(option):
        value = next((word.partition("=")[2] for word in words if word.startswith(f"{option}=")), "false")
        return f"{option} is no option here; its name is {known}: set {known}={value}"
    names = _names_of_options(words)
    node = option.rpartition(".")[0]
    hint = f"{option} is no option here; {nearest_options(option, names)}"
    if node and any(name.startswith(f"{node}.") for name in names):
        hint += f" (+{option}=... sets an option of its class that is not in conf/)"
    return hint


def _names_of_options(words: Sequence[str]) -> set[str]:
    """Return the groups, and the options of the configuration that the groups on the command line choose."""
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    chosen = [word for word in words if re.split("[@=]", word.lstrip("+~"))[0] in groups]
    chosen = [word if "[" in word else word.partition(",")[0] for word in chosen]  # a sweep's first job
    search_path = [word for word in words if word.startswith("hydra.searchpath=")]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed: Any = OmegaConf.to_container(hydra.compose("train", [*chosen, *search_path]))
    return groups | {name for name in flatten_config(composed) if not re.match(r"runtime\b|.*\b_", name)}
