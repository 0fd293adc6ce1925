"""Images that stay on the device: which do, and that only indices come from the host.

tests/engine/parity/test_hardware.py trains with them on the device, and with workers.
"""

import pytest
import torch

from src.data.images import ImageSet, ImageSplit, should_keep_on_device

CPU, META = torch.device("cpu"), torch.device("meta")


def split() -> ImageSplit:
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (100, 3, 8, 8), dtype=torch.uint8, generator=rng)
    return ImageSplit(ImageSet(images, torch.arange(100) % 10), indices=torch.randperm(100, generator=rng)[:70])


def test_splits_use_the_same_storage_on_any_device() -> None:
    """The meta device stands for a GPU: only positions come from the host."""
    train = split()
    val = ImageSplit(train.dataset, torch.arange(5))
    train.device_resident = True
    assert train.move_to(META)
    assert not val.move_to(CPU)
    assert val.dataset.images.device == val.dataset.labels.device == META
    batch = train.fetch(torch.empty(16, dtype=torch.int64, device=META))
    assert {field.device for field in batch} == {META}
    assert batch.image.shape == (16, 3, 8, 8)


def test_auto_allows_a_tenth_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, images = torch.device("cuda", 0), split().dataset.images
    for free, room in ((10 * images.nbytes, True), (10 * images.nbytes - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**12))
        assert should_keep_on_device(images, cuda, "auto") == room
        assert should_keep_on_device(images, cuda, True)
        assert not should_keep_on_device(images, cuda, False)
    assert should_keep_on_device(images, CPU, "auto")
    assert not should_keep_on_device(images, torch.device("mps"), "auto")
