"""Images on the device give the same batches as a DataLoader, and only indices come from the host."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from src.data.images import ImageSet, ImageSplit, as_is, should_keep_on_device
from src.engine.determinism.batch import Batch
from src.engine.determinism.layout import BatchLayout, DataParallelInfo
from src.engine.determinism.loader import RankLoader
from src.engine.determinism.sampler import EvaluationBatches, TrainingBatches

CPU, META = torch.device("cpu"), torch.device("meta")


def split() -> ImageSplit:
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (100, 3, 8, 8), dtype=torch.uint8, generator=rng)
    return ImageSplit(ImageSet(images, torch.arange(100) % 10), indices=torch.randperm(100, generator=rng)[:70])


def rank_loader(data: ImageSplit, sampler: Any, workers: int = 0) -> RankLoader:
    loader: Any = DataLoader(data, 16, num_workers=workers, collate_fn=as_is)
    return RankLoader(loader, sampler, 0, CPU, on_batch=lambda positions: None)


@pytest.mark.parametrize(
    "sampler",
    [
        TrainingBatches(70, BatchLayout(16)),
        TrainingBatches(70, BatchLayout(16, DataParallelInfo(2, 1, num_microbatches=2), accumulate=2)),
        EvaluationBatches(70, 16),
        EvaluationBatches(70, 48, DataParallelInfo(3, 2)),
    ],
    ids=["train", "train on a rank", "evaluate", "evaluate on a rank"],
)
def test_batches_equal_those_of_a_worker(sampler: Any) -> None:
    batches, fetched = list(rank_loader(split(), sampler)), list(rank_loader(split(), sampler, workers=1))
    assert len(batches) == len(rank_loader(split(), sampler)) > 0
    for ours, theirs in zip(batches, fetched, strict=True):
        for name in Batch._fields:
            assert torch.equal(getattr(ours, name), getattr(theirs, name))


def test_epoch_and_start_are_read_with_the_first_batch() -> None:
    sampler = TrainingBatches(70, BatchLayout(16))
    iterator = iter(rank_loader(split(), sampler))
    sampler.set_epoch(3)
    sampler.start = 32
    later = TrainingBatches(70, BatchLayout(16))
    later.set_epoch(3)
    expected = [split().indices[positions] for positions in later][2:]
    assert [batch.sample_index.tolist() for batch in iterator] == [index.tolist() for index in expected]
    sampler.start = 64
    assert list(rank_loader(split(), sampler)) == []


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
