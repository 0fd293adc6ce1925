"""Say in one line what is wrong with a command that Hydra refuses, and which names exist."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf

from src.utils.errors import UserError, nearest_options, suggest
from src.utils.flatten import flatten_config
from src.utils.targets import accepted_options, locate

CONF = Path(__file__).parents[2] / "conf"
_RECIPES = ("experiment", "preset", "debug")  # their files set options that other files have
_EXTRA = {"hydra/launcher": ("joblib", "submitit_local", "submitit_slurm")}  # choices of the extra `sweeps`


def explain(error: Exception, words: Sequence[str]) -> str:
    """Return an error of Hydra as one line.

    Args:
        error: the error.
        words: the command line without the name of the program.
    """
    if cause := _user_error(error):  # a resolver in conf/train.yaml raised it
        return str(cause)
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error.override, words)
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return _explain_choice(group, name, words)
    # Hydra gives the names of options in its messages only: validate_sweep_overrides_legal and
    # _apply_overrides_to_config in
    # https://github.com/facebookresearch/hydra/blob/v1.3.2/hydra/_internal/config_loader_impl.py
    if several := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'", message):
        name, _, value = several[1].partition("=")
        return f"{several[1]}: add -m for a run with each of the values, or write a list as '{name}=[{value}]'"
    if existing := re.match(r"Could not append to config. An item is already at '([\w.]+)'", message):
        return f"+{existing[1]}: there is such an option; leave out the +"
    if missing := re.match(r"In '(.+)': Could not override '([\w/.]+)'. No match in the defaults list", message):
        return f"{missing[1]}.yaml: override /{missing[2]}: there is no such group; {suggest(missing[2], _groups())}"
    if unknown := re.match(r"Could not override '([\w.]+)'", message):
        try:
            return _explain_option(unknown[1], words)
        except UserError as cause:  # there is no such `_target_`
            return str(cause)
    return f"{message} {error.__cause__}".splitlines()[0] if error.__cause__ else message


def explain_yaml(error: yaml.MarkedYAMLError) -> str:
    """Return an error in the syntax of a YAML file as one line."""
    mark = error.problem_mark or error.context_mark
    where = f"{mark.name} line {mark.line + 1}" if mark else "a YAML file"
    return f"{where} is no valid YAML ({error.problem}): check the indentation of this line and of those before it"


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


def _explain_choice(group: str, name: str, words: Sequence[str]) -> str:
    if name in _EXTRA.get(group, ()):
        return f"{group}={name}: not installed here; it comes with pip install '.[sweeps]'"
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        options = GlobalHydra.instance().config_loader().get_group_options(group, overrides=_search_path(words))
    choices = [choice for choice in options if not choice.startswith("_")]
    if not name:
        return f"{group}=: give one of {', '.join(choices)}"
    return f"{group}={name}: there is no {name} in conf/{group}; {suggest(name, choices)}"


def _explain_option(option: str, words: Sequence[str]) -> str:
    cfg = _compose_choices(words)
    node, _, key = option.rpartition(".")
    given = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{node}._target_=")]
    target = given[-1] if given else OmegaConf.select(OmegaConf.create(cfg), f"{node}._target_")
    accepted = accepted_options(locate(f"{node}._target_", target)) if target else set()
    addition = f"+{option}=... passes it on to {target}"
    if accepted and key in accepted:
        return f"{option} is not set in conf/: {addition}"
    if choices := _options_of_choices().get(option):
        return (
            f"{option} is no option here; {' and '.join(sorted(choices))} {'has' if len(choices) == 1 else 'have'} it"
        )
    names = {name for name in flatten_config(cfg) if not re.match(r"runtime\b|.*\b_", name)}
    if not node:
        names |= _groups()
    if accepted is None:
        return f"{option} is no option here; {nearest_options(option, names)} ({addition})"
    names |= {f"+{node}.{name}" for name in accepted if f"{node}.{name}" not in names}
    return f"{option} is no option here; {nearest_options(option, names)}"


def _groups() -> set[str]:
    return {folder.name for folder in CONF.iterdir() if folder.is_dir()}


def _options_of_choices() -> dict[str, set[str]]:
    """Return the choices in whose files an option is, by the name of the option."""
    choices = defaultdict(set)
    for file in CONF.glob("*/[!_]*.yaml"):
        group = file.parent.name
        if group not in _RECIPES:
            for name in _options_of(file):
                choices[name].add(f"{group}={file.stem}")
    return choices


def _options_of(file: Path) -> set[str]:
    """Return the options of a file and of the files of its group on which it builds."""
    text = file.read_text()
    content: dict[str, Any] = yaml.safe_load(text) or {}
    parents = [parent for parent in content.pop("defaults", []) if isinstance(parent, str) and parent != "_self_"]
    package = re.match(r"# @package (\S+)", text)
    prefix = package[1].replace("_global_", "") if package else file.parent.name
    return set(flatten_config(content, prefix)).union(*(_options_of(file.with_stem(parent)) for parent in parents))


def _compose_choices(words: Sequence[str]) -> dict[str, Any]:
    """Return the configuration without the values on the command line, as far as its choices can be composed."""
    groups = [word for word in words if (CONF / re.split("[@=]", word.lstrip("+~"))[0]).is_dir()]
    groups = [word if "[" in word else word.partition(",")[0] for word in groups]  # a sweep's first job
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed: Any = OmegaConf.to_container(hydra.compose("train", [*groups, *_search_path(words)]))
    return composed


def _search_path(words: Sequence[str]) -> list[str]:
    return [word for word in words if word.startswith("hydra.searchpath=")]
