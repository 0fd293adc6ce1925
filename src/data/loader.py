"""The DataLoader of a rank: batches from the device, or fetched on the host."""

import os
import signal
import sys
import threading
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from src.data.batch import Batch
from src.data.resident import ResidentBatches, should_keep_on_device
from src.data.sampler import Batches
from src.data.splits import ImageSplit
from src.utils import signals
from src.utils.errors import UserError


def check_residency(choice: str | bool, num_workers: int, has_transforms: bool) -> None:
    """Check `data.device_resident`: workers and transforms use images on the host.

    Raises:
        UserError: if it is no choice, or excludes another option.
    """
    if choice not in ("auto", True, False) or (choice is True and num_workers):
        raise UserError(f"data.device_resident={choice}: give auto, false, or true with data.num_workers=0")
    if choice is True and has_transforms:
        raise UserError("data.device_resident=true, but data.augment.transforms run on the host: set auto")


def build_loader(
    data: Dataset[Batch], batches: Batches, device: torch.device, choice: str | bool, num_workers: int
) -> DataLoader[Batch]:
    """Return a DataLoader of this rank's batches; `choice` decides whether the images are on the device or the host."""
    if isinstance(data, ImageSplit) and should_keep_on_device(data, device, choice, num_workers):
        return ResidentBatches(data, batches, device)
    pin = device.type == "cuda"
    return HostBatches(
        data,
        sampler=batches,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin,
        worker_init_fn=_outlive_stop_requests,
    )


def _outlive_stop_requests(worker: int) -> None:
    """Let a worker process outlive signals to all processes: the rank still fetches a batch, saves and stops.

    Of SIGTERM, only the rank's own counts, by which DataLoader ends a worker that hangs.
    """
    for number in set(signals.SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # macOS does not tell who sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_exit_when_terminated_by, args=[os.getppid()], daemon=True).start()


def _exit_when_terminated_by(rank: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank:
        pass
    os._exit(0)  # with another code, DataLoader would report a failed worker


class HostBatches(DataLoader[Batch]):
    """A DataLoader that reports a UserError of a worker in one line, without the worker's traceback."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        try:
            yield from super().__iter__()
        except UserError as error:
            error.__traceback__ = None  # it refers to the iterator, which without it ends its workers at once
            # From a worker, torch raises the error with the text of its traceback, whose last line is the message.
            message = str(error).rpartition(f"{UserError.__qualname__}: ")[2].strip()
            raise UserError(message) from None
