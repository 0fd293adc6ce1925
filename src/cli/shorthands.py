"""Short forms on the command line: `ckpt_path=RUN_DIR` and `sweep=FOLDER` restore the saved overrides."""

from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from src.run.folder import CONFIG, folder_of
from src.utils.errors import UserError

_CONF = Path(__file__).parents[2] / "conf"
_OPTIONAL = ("experiment", "preset", "debug")  # config groups that need no choice
_SWEEP = "multirun.yaml"  # Hydra's own record of a sweep


def with_saved_overrides(argv: list[str]) -> list[str]:
    """Return the command line with the saved overrides of the run in `ckpt_path=`, if there is one.

    An option on the command line replaces its saved override. A choice of a group (`model=...`) replaces all saved
    overrides of that group.
    """
    at = next((place for place, word in enumerate(argv) if word.startswith("ckpt_path=")), None)
    folder = folder_of(Path(argv[at].partition("=")[2].strip("'\""))) if at is not None else None
    if folder is None:
        return argv
    return [*argv[:at], *_not_given(OmegaConf.load(folder / CONFIG).overrides, argv), *argv[at:]]


def with_saved_sweep(argv: list[str]) -> list[str]:
    """Return the command line with `sweep=FOLDER` replaced by the saved overrides of that sweep.

    An option on the command line replaces its saved override, as in `with_saved_overrides`.

    Raises:
        UserError: if there is no sweep in that folder.
    """
    at = next((place for place, word in enumerate(argv) if word.startswith("sweep=")), None)
    if at is None:
        return argv
    folder = Path(argv[at].partition("=")[2].strip("'\"")).expanduser().absolute()
    if not (folder / _SWEEP).is_file():
        raise UserError(
            f"{argv[at]}: there is no sweep in that folder ({folder / _SWEEP}): give the one it was made in"
        )
    saved = yaml.safe_load((folder / _SWEEP).read_text())["hydra"]["overrides"]  # as typed, not resolved
    quoted = str(folder).replace("'", "\\'")
    own = [word for word in saved["hydra"] if _name(word) not in ("hydra.sweep.dir", "hydra.mode")]
    words = [*_not_given([*own, *saved["task"]], argv), f"hydra.sweep.dir='{quoted}'"]
    return [argv[0], *([] if {"-m", "--multirun"} & set(argv) else ["-m"]), *argv[1:at], *words, *argv[at + 1 :]]


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


def _not_given(saved: Iterable[str], argv: list[str]) -> list[str]:
    """Return the saved overrides without those whose option or group `argv` gives again."""
    given = {_name(word) for word in argv}
    return [word for word in saved if not given.intersection(accumulate(_name(word).split("."), "{}.{}".format))]


def _name(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].replace("/", ".")
