"""Destruction of the process group."""

import torch.distributed as dist


def close_process_group() -> None:
    """Destroy the process group. A process that exits while its gloo group exists may abort."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
