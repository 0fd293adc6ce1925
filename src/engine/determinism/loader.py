"""The DataLoader of a rank: batches of images that stay on its device, or that are fetched on the host."""

import os
import signal
import sys
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from src.engine.determinism.batch import Batch
from src.engine.determinism.dataset import ImageSplit
from src.engine.determinism.sampler import Batches
from src.engine.utils import signals
from src.engine.utils.errors import UserError

_MAX_FRACTION = 0.1  # of a GPU's free memory, for the images under `auto`


def check_residency(choice: str | bool, num_workers: int) -> None:
    """Check `data.device_resident`: workers use images on the host."""
    if choice not in ("auto", True, False) or (choice is True and num_workers):
        raise UserError(f"data.device_resident={choice}: give auto, false, or true with data.num_workers=0")


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


def should_keep_on_device(split: ImageSplit, device: torch.device, choice: str | bool, num_workers: int) -> bool:
    """Return whether to keep the images of the split on the device.

    Under `auto` they stay there if they are there already, or need a small fraction of a GPU's free memory. Workers
    cannot use images on a device.

    Raises:
        UserError: if the choice is true, but the images are not in memory.
    """
    images = split.dataset.images
    if not isinstance(images, Tensor):
        if choice is True:
            raise UserError(
                "data.device_resident=true, but the images are not in memory: set data.device_resident=auto"
            )
        return False
    if choice != "auto" or num_workers:
        return choice is True
    if images.device == device:
        return True
    return device.type == "cuda" and images.nbytes <= _MAX_FRACTION * torch.cuda.mem_get_info(device)[0]


class ResidentBatches(DataLoader[Batch]):
    """A DataLoader that gathers batches from images on the device, without workers and per-batch overhead.

    All indices of an epoch are sent at once from pinned memory, without a host-device synchronization.
    """

    def __init__(self, split: ImageSplit, sampler: Batches, device: torch.device) -> None:
        super().__init__(split, sampler=sampler, batch_size=None)
        split.dataset.move(device)
        self.split, self.batches, self.device = split, sampler, device

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        index = self.split.sample_indices(self.batches.table())
        if self.device.type == "cuda":
            index = index.pin_memory().to(self.device, non_blocking=True)
        dataset = self.split.dataset
        rows = index.clamp_min(0)  # padding fetches sample 0, with weight 0
        batches = zip(rows, dataset.labels[rows], index, index >= 0, strict=True)
        for batch_rows, target, sample_index, weight in batches:
            yield Batch(dataset.gather(batch_rows), target, sample_index, weight)


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
