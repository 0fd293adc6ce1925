"""The template from Python: `from src import compose, train, load_run`, in a notebook or a script."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from src.cli.notebook import compose, train
    from src.run.trained import load_run

__all__ = ["compose", "load_run", "train"]
_MODULES = {"compose": "src.cli.notebook", "train": "src.cli.notebook", "load_run": "src.run.trained"}


def __getattr__(name: str) -> Any:
    """Import a function when it is first used, because `train.py --help` imports this package too."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
