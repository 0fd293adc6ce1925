"""Short forms on the command line: `ckpt_path=RUN_DIR` and `sweep=FOLDER` restore the saved overrides."""

from collections.abc import Iterable
from pathlib import Path

import yaml

from src.run.folder import folder_of, saved_config
from src.utils.errors import UserError

_CONF = Path(__file__).parents[2] / "conf"
_OPTIONAL = ("experiment", "preset", "debug")  # config groups that need no choice
_SWEEP = "multirun.yaml"  # Hydra's own record of a sweep


def with_saved_overrides(argv: list[str]) -> list[str]:
    """Return the command line with the saved overrides of the run in `ckpt_path=`, if there is one.

    An option on the command line replaces its saved override. A choice of a group (`model=...`) replaces all saved
    overrides of that group.
    """
    at = _find(argv, "ckpt_path=")
    folder = folder_of(_value(argv[at])) if at is not None else None
    if folder is None:
        return argv
    return [*argv[:at], *_drop_given(saved_config(folder).runtime.overrides, argv), *argv[at:]]


def with_saved_sweep(argv: list[str]) -> list[str]:
    """Return the command line with `sweep=FOLDER` replaced by the saved overrides of that sweep.

    An option on the command line replaces its saved override, as in `with_saved_overrides`.

    Raises:
        UserError: if there is no sweep in that folder.
    """
    at = _find(argv, "sweep=")
    if at is None:
        return argv
    folder = _value(argv[at]).expanduser().absolute()
    if not (folder / _SWEEP).is_file():
        raise UserError(
            f"{argv[at]}: there is no sweep in that folder ({folder / _SWEEP}): give the one it was made in"
        )
    saved = yaml.safe_load((folder / _SWEEP).read_text())["hydra"]["overrides"]  # as typed, not resolved
    quoted = str(folder).replace("'", "\\'")
    of_hydra = [word for word in saved["hydra"] if _name(word) not in ("hydra.sweep.dir", "hydra.mode")]
    restored = [*_drop_given([*of_hydra, *saved["task"]], argv), f"hydra.sweep.dir='{quoted}'"]
    multirun = [] if {"-m", "--multirun"} & set(argv) else ["-m"]
    return [argv[0], *multirun, *argv[1:at], *restored, *argv[at + 1 :]]


def without_null_choices(argv: list[str]) -> list[str]:
    """Return the command line with `logger=none` for `logger=null`, and without `experiment=null`, the default.

    Raises:
        UserError: if null is given for a group that needs a choice. Hydra would end with a traceback.
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


def _find(argv: list[str], start: str) -> int | None:
    """Return the index of the first word that starts so."""
    return next((index for index, word in enumerate(argv) if word.startswith(start)), None)


def _value(word: str) -> Path:
    """Return the path in an override, without the quotation marks that Hydra allows."""
    return Path(word.partition("=")[2].strip("'\""))


def _drop_given(saved: Iterable[str], argv: list[str]) -> list[str]:
    """Return the saved overrides without those whose option or group `argv` gives again."""
    given = {_name(word) for word in argv}
    kept = []
    for word in saved:
        parts = _name(word).split(".")
        groups = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        if not given & groups:
            kept.append(word)
    return kept


def _name(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].replace("/", ".")
