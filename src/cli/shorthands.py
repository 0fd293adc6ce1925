"""Short forms on the command line: `ckpt_path=best`; `ckpt_path=RUN_DIR` and `sweep=FOLDER` restore saved overrides."""

import sys
from collections.abc import Iterable
from pathlib import Path

import yaml

from src.checkpoint.run_files import CHECKPOINTS
from src.run.folder import CONFIG, folder_of, is_rank_zero, project_path, saved_config
from src.run.resume import newest_run
from src.utils.errors import UserError
from src.utils.quoting import quote

_CONF = Path(__file__).parents[2] / "conf"
_OPTIONAL = ("experiment", "preset", "debug")  # config groups that need no choice
_REMOVED = ("launch.endpoint", "launch.rendezvous_timeout")  # options of earlier versions, which their runs have saved
_SWEEP = "multirun.yaml"  # the configuration of a sweep, which Hydra saves in the sweep's folder


def with_found_runs(argv: list[str]) -> list[str]:
    """Return the command line with the path of the checkpoint for `last` and `best` in `ckpt_path=` and `init_from=`.

    `RUN_DIR/best` is the best checkpoint of a run, and `best` that of the newest run in the project's runs/. `last` is
    the newest complete checkpoint, as for `RUN_DIR`.

    Raises:
        UserError: if there is no such run, or it has no best.ckpt.
    """
    return [_with_found_run(word) if word.startswith(("ckpt_path=", "init_from=")) else word for word in argv]


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


def with_saved_overrides(argv: list[str]) -> list[str]:
    """Return the command line with the saved overrides of the run in `ckpt_path=`, if there is one.

    An option on the command line replaces its saved override. A choice of a group (`model=...`) replaces all saved
    overrides of that group.
    """
    index = _find(argv, "ckpt_path=")
    if index is None:
        return argv
    folder = folder_of(_path(argv[index]))
    if folder is None:
        return argv
    restored = _without_replaced(saved_config(folder).runtime.overrides, argv)
    return [*argv[:index], *restored, *argv[index:]]


def with_saved_sweep(argv: list[str]) -> list[str]:
    """Return the command line with `sweep=FOLDER` replaced by the saved overrides of that sweep.

    An option on the command line replaces its saved override, as in `with_saved_overrides`.

    Raises:
        UserError: if there is no sweep in that folder.
    """
    index = _find(argv, "sweep=")
    if index is None:
        return argv
    folder = _path(argv[index]).expanduser().absolute()
    file = folder / _SWEEP
    if not file.is_file():
        raise UserError(f"{argv[index]}: there is no sweep in that folder ({file}): give the folder of a sweep")
    overrides = yaml.safe_load(file.read_text())["hydra"]["overrides"]  # as typed, not resolved
    hydra_overrides = [word for word in overrides["hydra"] if _name(word) not in ("hydra.sweep.dir", "hydra.mode")]
    restored = _without_replaced([*hydra_overrides, *overrides["task"]], argv)
    multirun = [] if {"-m", "--multirun"} & set(argv) else ["-m"]
    return [argv[0], *multirun, *argv[1:index], *restored, f"hydra.sweep.dir={quote(folder)}", *argv[index + 1 :]]


def without_null_choices(argv: list[str]) -> list[str]:
    """Return the command line with `logger=none` for `logger=null`, and without `experiment=null`, the default.

    Hydra would end with a traceback at the choice null.

    Raises:
        UserError: if a group that needs a choice gets null.
    """
    words = []
    for word in argv:
        group, _, choice = word.partition("=")
        names = sorted(file.stem for file in (_CONF / group).glob("[!_]*.yaml"))
        if choice != "null" or not names:
            words.append(word)
        elif "none" in names:
            words.append(f"{group}=none")
        elif group not in _OPTIONAL:
            raise UserError(f"{word}: give one of {', '.join(names)}, or leave {group} out")
    return words


def missing_folder(argv: list[str]) -> str | None:
    """Return the override of Hydra's folder, if that does not exist, so that Hydra has failed to make it."""
    given = [word for word in argv if word.startswith(("hydra.run.dir=", "hydra.sweep.dir="))]
    return next((word for word in given if not _path(word).expanduser().is_dir()), None)


def _find(argv: list[str], start: str) -> int | None:
    """Return the index of the first word that starts with `start`, or None."""
    return next((index for index, word in enumerate(argv) if word.startswith(start)), None)


def _path(word: str) -> Path:
    """Return the path in an override, without the quotation marks that Hydra allows."""
    return Path(word.partition("=")[2].strip("'\""))


def _without_replaced(saved: Iterable[str], argv: list[str]) -> list[str]:
    """Return the saved overrides, except those of an option or a group that `argv` gives again, or that is no more."""
    given = {_name(word) for word in argv} | {*_REMOVED}
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
