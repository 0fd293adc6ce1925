"""The default: nothing on one device, DDP on several."""

from lightning.pytorch.strategies import DDPStrategy


def auto(devices: int, num_nodes: int) -> DDPStrategy | str:
    """What `Trainer(strategy=...)` takes for `devices` per node on `num_nodes` nodes."""
    return DDPStrategy() if devices * num_nodes > 1 else "auto"
