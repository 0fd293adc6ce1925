"""Build the object that a configuration node describes."""

import re
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from src.utils.errors import UserError


def build(node: DictConfig, **changes: Any) -> Any:
    """Build the object that a configuration node describes; it receives plain lists and dictionaries.

    Raises:
        UserError: if the constructor raised it, which Hydra's own exception would hide, or does not take an option.
    """
    try:
        return instantiate(node, _convert_="all", **changes)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        if option := _unexpected_option(error):
            raise UserError(f"{option}: leave it out, or choose a class that has it") from error
        raise


def _unexpected_option(error: InstantiationException) -> str | None:
    """Return what is wrong if the class of a node does not take one of its options, for example with another model.

    Python and Hydra give the names in their messages only.
    """
    target = re.search(r"Error in call to target '(.+)':", str(error))
    option = re.search(r"\(\) got an unexpected keyword argument '(\w+)'", str(error.__cause__))
    return f"{target[1]} has no option `{option[1]}`" if target and option else None
