"""Timeouts of the process groups, and their safe end."""

import time
from datetime import timedelta

import torch.distributed as dist

_PAUSE = 0.05  # seconds, so that gloo's threads can take the GIL
_MARGIN = timedelta(minutes=5)


def set_timeouts_after(seconds: float) -> None:
    """Let the collectives of all process groups fail some minutes after `launch.timeout` seconds.

    The timer of `src/engine/run/stopping.py` then ends the rank that hangs. NCCL would end one that waits for it: by
    default after half an hour, and after ten minutes in the subgroups of a device mesh, which take no timeout.
    """
    if dist.is_available() and dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds) + _MARGIN, group)


def close_process_group() -> None:
    """Destroy the process group. A process that exits while its gloo group exists may abort.

    The pause avoids a deadlock in torch (docs/upstream/gloo_gil.md). A thread of gloo that still has to free a tensor
    waits for the GIL, and the destructor of the group holds the GIL while it waits for that thread.
    """
    if dist.is_available() and dist.is_initialized():
        time.sleep(_PAUSE)
        dist.destroy_process_group()
