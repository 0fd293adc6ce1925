"""Refuse overrides of a group that the chosen module does not use, because they would have no effect."""

import re
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from src.utils.errors import UserError

_PARTS = ("model", "optimizer", "scheduler")  # the groups from which a module is built


def refuse_unused_groups(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Check that the module refers to each group that an override chooses or changes.

    Args:
        cfg: the composed configuration, before interpolations are resolved.
        overrides: the command line.

    Raises:
        UserError: if it does not, such as `model=vit` with `module=gan`.
    """
    module = OmegaConf.to_yaml(cfg.module)  # with interpolations such as ${model} or ${model.width}
    for override in overrides:
        group = re.split(r"[.=]", override.lstrip("+~"))[0]
        if group in _PARTS and not re.search(rf"\${{{group}\b", module):
            raise UserError(f"{override}: {cfg.module._target_} does not use `{group}`; leave the option out")
