"""Build the object that a configuration node describes."""

import re
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from src.utils.errors import UserError


def build(node: DictConfig, **changes: Any) -> Any:
    """Build the object that a configuration node describes; it receives plain lists and dictionaries.

    Raises:
        UserError: if the constructor raised it, which Hydra's own exception would hide, does not take an option, or
            needs a package that is not installed.
    """
    try:
        return instantiate(node, _convert_="all", **changes)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, ModuleNotFoundError) and not error.__cause__.name:
            # No import failed: a class of Lightning found that an optional package is missing.
            raise UserError(f"{node._target_}: {error.__cause__}") from error
        if problem := _find_unexpected_option(error, node):
            raise UserError(f"{problem}: leave it out, or choose a class that has it") from error
        raise


def _find_unexpected_option(error: InstantiationException, node: DictConfig) -> str | None:
    """Return what is wrong if a class does not take one of the node's options, for example with another model.

    Python and Hydra give the names in their messages only.
    """
    target = re.search(r"Error in call to target '(.+)':", str(error))
    option = re.search(r"\(\) got an unexpected keyword argument '(\w+)'", str(error.__cause__))
    if target and option and re.search(rf"\b{option[1]}:", OmegaConf.to_yaml(node)):
        return f"{target[1]} has no option `{option[1]}`"
    return None
