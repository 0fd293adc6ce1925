"""The result of a check, which is one line of the doctor's report."""

from collections.abc import Callable
from typing import NamedTuple

from omegaconf import DictConfig

from src.launch.failures import RankFailedError
from src.utils.errors import UserError

Check = Callable[[DictConfig], str]


class Finding(NamedTuple):
    """What a check has found: a few words if all is well, otherwise what is wrong and what to do."""

    name: str
    ok: bool
    text: str


def run_check(name: str, check: Check, cfg: DictConfig) -> Finding:
    """Return the finding of a check, which returns a text, or raises UserError if something is wrong.

    Any other exception becomes a finding as well, so that the remaining checks still run.
    """
    try:
        return Finding(name, True, check(cfg))
    except UserError as error:
        return Finding(name, False, " ".join(str(error).split()))
    except RankFailedError as error:  # the ranks have written to the terminal, and not to a log
        return Finding(name, False, str(error).splitlines()[0].partition("; its log is")[0])
    except Exception as error:
        return Finding(name, False, f"the check failed: {type(error).__name__}: {' '.join(str(error).split())}")
