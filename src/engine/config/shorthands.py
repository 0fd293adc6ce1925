"""Short forms on the command line: `ckpt_path=best`; `ckpt_path=RUN_DIR` and `sweep=FOLDER` restore saved overrides."""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from src.engine.config.folder import CONFIG, PROJECT, folder_of, is_rank_zero, newest_run, project_path, saved_config
from src.engine.state.run_files import CHECKPOINTS
from src.engine.utils.errors import UserError
from src.engine.utils.overrides import quote

_CONF = PROJECT / "conf"
_OPTIONAL = ("experiment", "preset", "debug")  # config groups that need no choice
_SWEEP = "multirun.yaml"  # the configuration of a sweep, which Hydra saves in the sweep's folder


def complete_overrides(words: Sequence[str]) -> list[str]:
    """Return the overrides that Hydra gets for those that the user has typed; flags stay as they are.

    Raises:
        UserError: if one sets what only the program may set, or there is no such run, checkpoint or sweep.
    """
    for word in words:
        if re.match(r"[+~]*runtime\b", word):
            raise UserError(f"{word}: the program sets `runtime` when a run starts; leave it out")
        if re.match(r"[+~]*hydra[./]job_logging\b", word):
            raise UserError(f"{word}: each rank logs to logs/rankN.log in the run folder; leave it out")
    return without_null_choices(_with_saved_sweep(_with_saved_overrides(with_found_runs(words))))


def with_found_runs(words: Sequence[str]) -> list[str]:
    """Return the overrides with the path of the checkpoint for `last` and `best` in `ckpt_path=` and `init_from=`.

    `RUN_DIR/best` is the best checkpoint of a run, and `best` that of the newest run in the project's runs/. `last` is
    the newest complete checkpoint, as for `RUN_DIR`.

    Raises:
        UserError: if there is no such run, or it has no best.ckpt.
    """
    return [_with_found_run(word) if word.startswith(("ckpt_path=", "init_from=")) else word for word in words]


def _with_found_run(word: str) -> str:
    path = _path(word)
    if path.name not in ("last", "best"):
        return word
    run = _newest_run(word) if str(path) == path.name else path.parent.expanduser()
    if not (run / CONFIG).is_file():
        return word
    checkpoint = run / CHECKPOINTS / "best.ckpt" if path.name == "best" else run
    if not checkpoint.exists():
        names = ", ".join(sorted(file.name for file in checkpoint.parent.glob("*.ckpt")))
        raise UserError(f"{word}: there is no best.ckpt in {checkpoint.parent}: give another file ({names})")
    return f"{word.partition('=')[0]}={quote(checkpoint)}"


def _newest_run(word: str) -> Path:
    runs = Path(project_path("runs"))
    run = newest_run(runs)
    if run is None:
        raise UserError(f"{word}: there is no run with a checkpoint in {runs}: give the folder of a run")
    if is_rank_zero():
        print(f"{word}: the newest run is {run}", file=sys.stderr)
    return run


def _with_saved_overrides(words: list[str]) -> list[str]:
    """Insert the saved overrides of the run in `ckpt_path=`, if there is one.

    An option on the command line replaces its saved override. A choice of a group (`model=...`) replaces all saved
    overrides of that group.
    """
    for index, word in enumerate(words):
        if word.startswith("ckpt_path=") and (folder := folder_of(_path(word))):
            restored = _without_replaced(saved_config(folder).runtime.overrides, words)
            return [*words[:index], *restored, *words[index:]]
    return words


def _with_saved_sweep(words: list[str]) -> list[str]:
    """Replace `sweep=FOLDER` by the saved overrides of that sweep, in the same way."""
    for index, word in enumerate(words):
        if word.startswith("sweep="):
            folder = _path(word).expanduser().absolute()
            if not (folder / _SWEEP).is_file():
                raise UserError(f"{word}: there is no sweep in that folder ({folder / _SWEEP}): give that of a sweep")
            saved = yaml.safe_load((folder / _SWEEP).read_text())
            overrides = saved["hydra"]["overrides"]  # as typed, not resolved
            of_hydra = [other for other in overrides["hydra"] if _name(other) not in ("hydra.sweep.dir", "hydra.mode")]
            restored = _without_replaced([*of_hydra, *overrides["task"]], words)
            multirun = [] if {"-m", "--multirun"} & {*words} else ["-m"]
            return [*multirun, *words[:index], *restored, f"hydra.sweep.dir={quote(folder)}", *words[index + 1 :]]
    return words


def without_null_choices(words: Iterable[str]) -> list[str]:
    """Return the overrides with `logger=none` for `logger=null`, and without `experiment=null`, the default.

    Hydra would end with a traceback at the choice null.

    Raises:
        UserError: if a group that needs a choice gets null.
    """
    kept = []
    for word in words:
        group, _, choice = word.partition("=")
        names = sorted(file.stem for file in (_CONF / group).glob("[!_]*.yaml"))
        if choice != "null" or not names:
            kept.append(word)
        elif "none" in names:
            kept.append(f"{group}=none")
        elif group not in _OPTIONAL:
            raise UserError(f"{word}: give one of {', '.join(names)}, or leave {group} out")
    return kept


def _path(word: str) -> Path:
    """Return the path in an override, without the quotation marks that Hydra allows."""
    return Path(word.partition("=")[2].strip("'\""))


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
