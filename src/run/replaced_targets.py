"""Leave out the options of a class that the command line replaces by another one."""

from collections.abc import Iterable

from omegaconf import DictConfig, OmegaConf, open_dict

from src.run.option_checks import NOT_PASSED
from src.utils.targets import accepted_options, locate


def drop_replaced_options(cfg: DictConfig, overrides: Iterable[str]) -> list[str]:
    """Remove the options that a class named by an override `NODE._target_=...` does not accept.

    They come from the YAML of the class before it. Options on the command line stay, and are refused later.

    Args:
        cfg: the composed configuration, before interpolations are resolved; it is changed.
        overrides: the command line.

    Returns:
        A message for each class.

    Raises:
        UserError: if there is no such class.
    """
    given = [override.lstrip("+~").partition("=")[0] for override in overrides]
    messages = []
    for name in given:
        node_name, _, key = name.rpartition(".")
        node = OmegaConf.select(cfg, node_name) if key == "_target_" else None
        if node and key in node:
            dropped = [option for option in _unaccepted(node, name) if f"{node_name}.{option}" not in given]
            with open_dict(node):
                for option in dropped:
                    del node[option]
            if dropped:
                names = f"option {dropped[0]}" if len(dropped) == 1 else f"options {', '.join(dropped)}"
                messages.append(f"{node_name}: {node._target_} has no {names}, which conf/{node_name} sets: left out")
    return messages


def _unaccepted(node: DictConfig, name: str) -> list[str]:
    """Return the options of a node that its class does not accept."""
    accepted = accepted_options(locate(name, node._target_))
    if accepted is None:
        return []
    return [str(key) for key in node if not str(key).startswith("_") and key not in {*accepted, *NOT_PASSED}]
