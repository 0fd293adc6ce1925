"""Build the object that a configuration node describes."""

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from src.utils.errors import UserError


def build(node: DictConfig, **changes: Any) -> Any:
    """Build the object that a configuration node describes; it receives plain lists and dictionaries.

    Raises:
        UserError: if the constructor raised it; Hydra's own exception would hide it.
    """
    try:
        return instantiate(node, _convert_="all", **changes)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise
