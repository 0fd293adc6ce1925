"""The process groups of a rank, which Lightning opens: their timeouts and their end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from onecurve.patches.torch import set_timeout_of_all_groups
from onecurve.process.signals import Stopped

_PAUSE = 0.05  # seconds, so that gloo's threads can take the GIL
_MARGIN = timedelta(minutes=5)


def set_timeouts_after(seconds: float) -> None:
    """Let the collectives of all process groups fail some minutes after `launch.timeout` seconds.

    The timer of `onecurve/run/stopping.py` then ends the rank that hangs. NCCL would end one that waits for it: by
    default after half an hour, and after ten minutes in the subgroups of a device mesh, which take no timeout.
    """
    if dist.is_initialized():
        set_timeout_of_all_groups(timedelta(seconds=seconds) + _MARGIN)


def close_process_group() -> None:
    """Destroy the process group. A process that exits while its gloo group exists may abort.

    The pause avoids a deadlock in torch (docs/upstream/gloo_gil.md). A thread of gloo that still has to free a tensor
    waits for the GIL, and the destructor of the group holds the GIL while it waits for that thread.
    """
    if dist.is_initialized():
        time.sleep(_PAUSE)
        dist.destroy_process_group()


@contextmanager
def process_group_closed() -> Iterator[None]:
    """Close the process group after the code in this context, also if a signal has stopped all ranks at one step.

    After another error it stays open: closing it would fail the other ranks before this one has reported its error, and
    NCCL might wait for them.
    """
    try:
        yield
    except Stopped:
        close_process_group()
        raise
    close_process_group()
