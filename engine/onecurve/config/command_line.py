"""Complete the command line of a Hydra application, and explain Hydra's errors in one line with a solution.

The short forms on the command line are `best`, `last` and `RUN_DIR/best` for `ckpt_path=` and `init_from=`; and
`ckpt_path=RUN_DIR` and `sweep=FOLDER`, which restore saved overrides.
"""

import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from onecurve.config.folder import CONF, PROJECT, RECIPES, REQUIRED_GROUPS, folder_of, saved_config
from onecurve.errors import UserError, nearest_options, suggest
from onecurve.identity.option_kinds import flatten_config
from onecurve.process.started_by import started_rank
from onecurve.records.files import CHECKPOINTS, CONFIG

# torch warns on macOS, in each process, that it does not redirect output, which nothing here asks for.
logging.getLogger("torch.distributed.elastic.multiprocessing.redirects").setLevel(logging.ERROR)
_PATHS = "ckpt_path init_from run_dir predict sweep data.root data.source.file hydra.run.dir hydra.sweep.dir".split()
_NEEDS_QUOTES = re.compile(r"[^\w\s/\\.,:$%*@?|(){}\[\]+-]", re.ASCII)  # Hydra takes it in quotation marks only
_HAS_QUOTES = re.compile(r"""(^|[,(])\s*['"]""")  # around the path, or one of a sweep
_SWEEP = "multirun.yaml"  # the configuration of a sweep, which Hydra saves in the sweep's folder


def complete_overrides(words: Sequence[str]) -> list[str]:
    """Return the overrides that Hydra gets for those that the user has typed; flags stay as they are.

    The saved overrides of the run in `ckpt_path=` come before it, those of the sweep in `sweep=` in its place. An
    option on the command line replaces its saved override; a choice of a group (`model=...`) all of that group.
    """
    for word in words:
        name, _, choice = word.partition("=")
        names = _choices(group := name.lstrip("+"))
        if names and choice not in names and re.fullmatch(r"(?i)null|true|false|[-+\d.e]+|[-+]?(inf|nan)", choice):
            # Hydra would end with a traceback.
            others = "" if group in (*REQUIRED_GROUPS, "callbacks") else f", or ~{group} to leave it out"
            raise UserError(f"{word}: give one of {', '.join(names)}{others}")
        if group == "run_dir" and {"-m", "--multirun"} & {*words}:
            raise UserError(
                f"{word}: the jobs of a sweep have folders of their own; set hydra.sweep.dir for all of them"
            )
        if group in _PATHS and "=" in word and not choice.strip("'\""):
            raise UserError(f"{word} is empty: give a path, or leave the option out")
    # Python's argparse takes no flag between overrides.
    words = sorted([_with_complete_path(word) for word in words], key=lambda word: word not in ("-m", "--multirun"))
    for index, word in enumerate(words):
        if word.startswith("ckpt_path=") and (folder := folder_of(_path(word))):
            _check_goes_on_in_its_folder(words, folder)
            saved = saved_config(folder).runtime.overrides
            return [*words[:index], *_without_replaced(saved, words), *words[index:]]
        if word.startswith("sweep="):
            folder = _path(word).expanduser().absolute()
            flags = [] if {"-m", "--multirun"} & {*words} else ["-m"]
            restored = [*_without_replaced(_overrides_of_sweep(folder), words), f"hydra.sweep.dir={quote(folder)}"]
            return [*flags, *words[:index], *restored, *words[index + 1 :]]
    return words


def _choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("[!_]*.yaml")) if group else []


def _check_goes_on_in_its_folder(words: Sequence[str], folder: Path) -> None:
    """Raise a UserError if `run_dir` names another folder than that of the run which goes on."""
    is_evaluation = any(word.lower() == "fit=false" for word in words)
    for word in words:
        if word.startswith("run_dir=") and not is_evaluation and _path(word).expanduser().absolute() != folder:
            raise UserError(
                f"{word}: ckpt_path continues a run in its own folder, {folder}: leave run_dir out, or start a new run "
                "from its weights with init_from"
            )


def _with_complete_path(word: str) -> str:
    """Return the override of a path as Hydra needs it.

    `RUN_DIR/best` becomes the best checkpoint of a run, and `best` that of the newest run in the project's runs/.
    `last` is the newest complete checkpoint, as for `RUN_DIR`. A path such as `runs/lr=0.5` gets quotation marks.
    """
    name, _, typed = word.partition("=")
    if name.lstrip("+") not in _PATHS or "=" not in word:
        return word
    # A shell replaces ~ at the start of a word only.
    typed = re.sub(r"((?:^|,)['\"]?)~(?=/)", lambda found: found[1] + os.path.expanduser("~"), typed)
    if name in ("ckpt_path", "init_from") and (path := _path(word)).name in ("last", "best"):
        run = _newest_run(word) if str(path) == path.name else path.parent.expanduser()
        if (run / CONFIG).is_file():
            return f"{name}={quote(run / CHECKPOINTS / 'best.ckpt' if path.name == 'best' else run)}"
    needs_quotes = _NEEDS_QUOTES.search(typed) and not _HAS_QUOTES.search(typed)
    return f"{name}={quote(typed) if needs_quotes else typed}"


def _newest_run(word: str) -> Path:
    """Return the folder of the run, or of the job of a sweep, that was started last and has a checkpoint."""
    runs = PROJECT / "runs"
    configs = [*runs.glob(f"*/{CONFIG}"), *runs.glob(f"*/*/{CONFIG}")]
    started = [file for file in configs if any((file.parent / CHECKPOINTS).glob("*.ckpt"))]
    if not started:
        raise UserError(f"{word}: there is no run with a checkpoint in {runs}: give the folder of a run")
    newest = max(started, key=lambda file: file.stat().st_mtime_ns).parent
    if started_rank() == 0:
        print(f"{word}: the newest run is {newest}", file=sys.stderr)
    return newest


def _overrides_of_sweep(folder: Path) -> list[str]:
    """Return the overrides of a sweep as typed, not resolved."""
    if not (folder / _SWEEP).is_file():
        raise UserError(f"sweep={folder}: there is no sweep in that folder ({folder / _SWEEP}): give that of a sweep")
    overrides = yaml.safe_load((folder / _SWEEP).read_text())["hydra"]["overrides"]
    of_hydra = [word for word in overrides["hydra"] if _name(word) not in ("hydra.sweep.dir", "hydra.mode")]
    return [*of_hydra, *overrides["task"]]


def _path(word: str) -> Path:
    """Return the path in an override, without the quotation marks that Hydra allows."""
    return Path(word.partition("=")[2].strip("'\"").replace("\\'", "'"))


def _without_replaced(saved: Iterable[str], words: Iterable[str]) -> list[str]:
    """Return the saved overrides, except those of an option or a group that `words` give again."""
    given = {_name(word) for word in words}
    kept = []
    for word in saved:
        parts = _name(word).split(".")
        option_and_groups = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        if not given & option_and_groups:
            kept.append(word)
    return kept


def _name(override: str) -> str:
    """Return the dotted name of the option or group that an override sets."""
    return override.lstrip("+~").partition("=")[0].replace("/", ".")


def quote(value: Any) -> str:
    """Return the value as a quoted string in Hydra's override grammar."""
    escaped = str(value).replace("'", r"\'")
    return f"'{escaped}'"


@contextmanager
def errors_explained(words: Sequence[str]) -> Iterator[None]:
    """Turn what Hydra raises because of these overrides, or of a file in conf/, into a UserError of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.MarkedYAMLError) as error:
        raise UserError(_explain(error, words)) from error
    except OSError as error:
        made = [word for word in words if re.match(r"hydra\.(run|sweep)\.dir=", word) and str(error.filename) in word]
        if not made:
            raise
        raise UserError(f"{made[0]}: cannot make the folder ({error.strerror}): give another") from error


def _explain(error: Exception, words: Sequence[str]) -> str:
    """Return an error of Hydra as one line, with similar names for an unknown one on the command line."""
    cause: BaseException | None = error
    while cause := cause and (cause.__cause__ or cause.__context__):
        if isinstance(cause, UserError):  # of a resolver
            return str(cause)
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        recipe, _, chosen = group.partition("/")
        if recipe in RECIPES and chosen and (CONF / chosen).is_dir():
            return f"{recipe}: write `- override /{chosen}: {name}` among the `defaults` of its file"
        choices = error.options or [file.stem for file in (CONF / group).glob("*.yaml")]  # Hydra has none for a list
        hint = suggest(name, [choice for choice in choices if not choice.startswith("_")])
        elsewhere = sorted(f"{file.parent.name}={name}" for file in CONF.glob(f"*/{name}.yaml"))
        if _is_default(group, name) and not any(_name(word) in (group, *RECIPES) for word in words):
            return (
                f"conf/train.yaml has {group}: {name} among its `defaults`, and conf/{group}/ lacks that file: {hint}"
            )
        return f"{group}={name}: {hint}" + f"; there is {' and '.join(elsewhere)}" * bool(elsewhere)
    if relative := re.match(r"In '(\S+)': Could not override '\S+@", str(error)):
        return f"begin conf/{relative[1]}.yaml with the line `# @package _global_`"
    # Hydra gives the name of an unknown option in its message only (`_apply_overrides_to_config` in
    # https://github.com/facebookresearch/hydra/blob/v1.3.2/hydra/_internal/config_loader_impl.py).
    if unknown := re.match(r"Could not (?:override|delete from config\.) '([\w.]+)'", str(error)):
        hint = nearest_options(unknown[1], _names_of_options(words))
        return f"{unknown[1]} is no option here; {hint} (+{unknown[1]}=... adds it to the configuration)"
    line = " ".join(str(error).split())
    return f"{error.override}: {line}" if isinstance(error, OverrideParseException) else line


def _is_default(group: str, name: str) -> bool:
    """Return whether conf/train.yaml takes this choice of a group."""
    defaults = yaml.safe_load((CONF / "train.yaml").read_text()).get("defaults", [])
    return any(isinstance(entry, dict) and entry.get(group) == name for entry in defaults)


def _names_of_options(words: Sequence[str]) -> set[str]:
    """Return the groups, and the options of the configuration that the groups on the command line choose."""
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    chosen = [word for word in words if (CONF / f"{word.replace('=', '/')}.yaml").is_file()]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed: Any = OmegaConf.to_container(hydra.compose("train", chosen))
    return groups | {name for name in flatten_config(composed) if not re.match(r"runtime\b|.*\b_", name)}
