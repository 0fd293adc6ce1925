"""The default: nothing on one device, DDP on several."""

from src.strategies.ddp import DDP


def auto(devices: int | list[int], num_nodes: int) -> DDP | str:
    """What `Trainer(strategy=...)` takes for `devices`, by number or by index, on each of `num_nodes` nodes."""
    count = devices if isinstance(devices, int) else len(devices)
    return DDP() if count * num_nodes > 1 else "auto"
