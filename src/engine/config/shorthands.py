"""Short forms on the command line: `ckpt_path=best`; `ckpt_path=RUN_DIR` and `sweep=FOLDER` restore saved overrides."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from src.engine.config.folder import CONF, CONFIG, folder_of, is_rank_zero, project_path, saved_config
from src.engine.state.run_files import CHECKPOINTS
from src.engine.utils.errors import UserError
from src.engine.utils.overrides import quote

_SWEEP = "multirun.yaml"  # the configuration of a sweep, which Hydra saves in the sweep's folder


def complete_overrides(words: Sequence[str]) -> list[str]:
    """Return the overrides that Hydra gets for those that the user has typed; flags stay as they are.

    The saved overrides of the run in `ckpt_path=`, or of the sweep in `sweep=`, come in its place. An option on the
    command line replaces its saved override; a choice of a group (`model=...`) replaces all of that group.
    """
    for word in words:
        group, _, choice = word.partition("=")
        if choice == "null" and (CONF / group).is_dir():  # Hydra would end with a traceback
            names = sorted(file.stem for file in (CONF / group).glob("[!_]*.yaml"))
            raise UserError(f"{word}: give one of {', '.join(names)}, or ~{group} to leave it out")
    words = with_found_runs(words)
    for index, word in enumerate(words):
        if word.startswith("ckpt_path=") and (folder := folder_of(_path(word))):
            saved = saved_config(folder).runtime.overrides
            return [*words[:index], *_without_replaced(saved, words), *words[index:]]
        if word.startswith("sweep="):
            folder = _path(word).expanduser().absolute()
            flags = [] if {"-m", "--multirun"} & {*words} else ["-m"]
            restored = [*_without_replaced(_overrides_of_sweep(folder), words), f"hydra.sweep.dir={quote(folder)}"]
            return [*flags, *words[:index], *restored, *words[index + 1 :]]
    return words


def with_found_runs(words: Sequence[str]) -> list[str]:
    """Return the overrides with the path of the checkpoint for `last` and `best` in `ckpt_path=` and `init_from=`.

    `RUN_DIR/best` is the best checkpoint of a run, and `best` that of the newest run in the project's runs/. `last` is
    the newest complete checkpoint, as for `RUN_DIR`.
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
    return f"{word.partition('=')[0]}={quote(checkpoint)}"


def _newest_run(word: str) -> Path:
    """Return the folder of the run, or of the job of a sweep, that was started last and has a checkpoint."""
    runs = Path(project_path("runs"))
    configs = [*runs.glob(f"*/{CONFIG}"), *runs.glob(f"*/*/{CONFIG}")]
    started = [file for file in configs if any((file.parent / CHECKPOINTS).glob("*.ckpt"))]
    if not started:
        raise UserError(f"{word}: there is no run with a checkpoint in {runs}: give the folder of a run")
    newest = max(started, key=lambda file: file.stat().st_mtime_ns).parent
    if is_rank_zero():
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
