"""The network of a module of the user's: its attribute, and the beginning of the names of its weights."""

from typing import Any

NET = "net"


def network_of(module: Any) -> Any:
    """Return the network of a module, or None if it offers none."""
    return getattr(module, NET, None)
