"""The exception that is shown to the user as one line, without a traceback."""

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

_SIMILAR = 0.6  # share of equal letters, from 0 to 1
# What other projects call an option.
_SYNONYMS = {
    "train": "fit",
    "eval": "fit=false ckpt_path",
    "epochs": "trainer.max_epochs",
    "gpus": "trainer.devices",
    "fast_dev_run": "debug=one_step",
}


# What stands for options of the template in the messages of a script.
_IN_SCRIPTS = {
    "data.batch_size": "the loader's batch_size",
    "+strategy.find_unused_parameters=True": "strategy='ddp_find_unused_parameters_true'",
    "optimizer.lr or lengthen scheduler.warmup": "the learning rate",
    "with its weights by init_from": "with its weights by `load_from_checkpoint`, in another default_root_dir",
    "or callbacks=ema": "or the callback onecurve.EMA",
    ", such as callbacks.best.monitor, or callbacks.best=None": "",
    ", or leave this stage out (fit=False, test=False)": "",
    ", or take a model without batch normalization, such as vit": "",
}


class UserError(Exception):
    """An error that the user can fix; the message names the option and a solution."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: IPython calls this method, if it exists, instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class CheckpointUserError(UserError):
    """A checkpoint cannot be read or written, or is of another network or experiment."""


class DivergedUserError(UserError):
    """A loss or a weight is not finite."""


class RankFailedError(RuntimeError):
    """A rank failed for another reason than a user error; the message has its number, its error and its log.

    `dead_rank` is its number if it ended without an error of its own: a signal killed its process, or a library exited.
    """

    def __init__(self, message: str, dead_rank: int | None = None) -> None:
        super().__init__(message)
        self.dead_rank = dead_rank


def similar_names(word: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that are almost as similar to `word` as the nearest, or those that begin with it."""
    names = sorted(names)
    near = difflib.get_close_matches(word, names, n=3, cutoff=_SIMILAR)
    if not near:
        return [name for name in names if word and name.startswith(word)]
    return [name for name in near if _similarity(word, name) > _similarity(word, near[0]) - 0.15]


def _similarity(word: str, name: str) -> float:
    return difflib.SequenceMatcher(None, name, word).ratio()  # in the order of `get_close_matches`


def suggest(word: str, names: Iterable[str]) -> str:
    """Return the end of an error message: the names similar to `word`, or all of them if none is."""
    names = sorted(names)
    if similar := similar_names(word, names):
        return f"did you mean {' or '.join(similar)}?"
    return f"known: {', '.join(names)}"


def check_choice(option: str, value: object, choices: Iterable[str]) -> None:
    """Check that the value of an option is one of its choices."""
    names = list(choices)
    if value not in names:
        raise UserError(f"{option}={value}: {suggest(str(value), names)}")


def nearest_options(name: str, options: Iterable[str]) -> str:
    """Return the end of an error message about an unknown option: those that end with its name, or similar ones."""
    options, key = set(options), name.rpartition(".")[2]
    if key in _SYNONYMS:
        return f"did you mean {_SYNONYMS[key]}?"
    # Options of one node have similar full names, so the last part must be similar as well.
    similar = {option for option in options if _similarity(key, option.rpartition(".")[2]) >= _SIMILAR}
    names = sorted(option for option in options if option.endswith(f".{name}")) or similar_names(name, similar)
    return f"did you mean {' or '.join(names)}?" if names else "python train.py --cfg job lists all"


def in_python(message: str) -> str:
    """Return a message whose options are those of a script: bit_exact=True in place of bit_exact=true."""
    for typed, value in {"true": "True", "false": "False", "null": "None"}.items():
        message = re.sub(rf"(?<==){typed}\b", value, message)
    for option, words in _IN_SCRIPTS.items():
        message = message.replace(option, words)
    message = re.sub(r"; ckpt_path=\S+ goes on", "; fit(ckpt_path='last') goes on", message)
    message = re.sub(r"\binit_from=\S+ starts", "`load_from_checkpoint` starts", message)
    return re.sub(r"(?<![.\w/])(?:trainer|launch)\.(?=\w+=|devices\b|accumulate_grad_batches\b)", "", message)


def as_typed(value: Any) -> str:
    """Return the value for an error message: true, false and null as the user types them, others as Python does."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
