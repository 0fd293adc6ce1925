"""The default strategy: DDP on several devices, no strategy on one."""

from src.engine.parallel.ddp import DDP


def auto(devices: int | list[int], num_nodes: int) -> DDP | str:
    """Return the argument of `Trainer(strategy=...)`.

    Args:
        devices: number of devices per node, or their indices.
        num_nodes: number of nodes.
    """
    count = devices if isinstance(devices, int) else len(devices)
    return DDP() if count * num_nodes > 1 else "auto"
