"""Close the process group safely."""

import time

import torch.distributed as dist

_PAUSE = 0.05  # seconds, so that gloo's threads can take the GIL


def close_process_group() -> None:
    """Destroy the process group. A process that exits while its gloo group exists may abort.

    The pause avoids a deadlock in torch (docs/upstream/gloo_gil.md). A thread of gloo that still has to free a tensor
    waits for the GIL, and the destructor of the group holds the GIL while it waits for that thread.
    """
    if dist.is_available() and dist.is_initialized():
        time.sleep(_PAUSE)
        dist.destroy_process_group()
