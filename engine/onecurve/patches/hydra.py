"""Private names of Hydra 1.3."""

from hydra._internal.utils import _locate as locate  # `hydra.utils.get_object` logs its error, beside ours

__all__ = ["locate"]
