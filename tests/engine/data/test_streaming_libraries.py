"""The streams of webdataset, Hugging Face and litdata train the same on any number of ranks, and go on elsewhere.

webdataset is installed with the tests, and the other two by `make test-libraries`: litdata asks for torchvision, which
would replace torch, and comes without it.
"""

import io
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from tests.engine.data.test_any_loader import NOTHING, PLACES, WAYS, check_equal
from tests.support.comparison import check_resumed
from tests.support.interruption import die
from tests.support.loaders import points
from tests.support.pool import Pool
from tests.support.runs import compose, fit, fit_ranks

COUNT, SHARDS = 100, 4
LIBRARIES = ["webdataset", *(pytest.param(name, marks=pytest.mark.slow) for name in ("datasets", "litdata"))]


def point(index: int) -> tuple[Any, Any]:
    x, y = points(COUNT, 0)[index]
    return x.numpy(), y.numpy()


def _in_shards(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for index in range(shard, COUNT, SHARDS):
            x, y = point(index)
            yield {"x": x.tolist(), "y": y.tolist()}


def _as_pairs(samples: list[dict[str, Any]]) -> Any:
    return [torch.stack([sample[name] for sample in samples]) for name in ("x", "y")]


class Streamed(L.LightningDataModule):
    """100 shuffled points.

    Args:
        library: the library that makes the stream.
        folder: for its files.
    """

    def __init__(self, library: str, folder: str) -> None:
        super().__init__()
        self.library, self.folder = library, Path(folder)

    def prepare_data(self) -> None:
        if self.library == "litdata" and not (self.folder / "chunks").exists():
            import litdata

            litdata.optimize(point, list(range(COUNT)), output_dir=str(self.folder / "chunks"), chunk_size=16)
        if self.library == "webdataset":
            for shard in range(SHARDS):
                with tarfile.open(self.folder / f"points-{shard}.tar", "w") as file:
                    for index in range(shard, COUNT, SHARDS):
                        for name, values in zip(("x", "y"), point(index), strict=True):
                            _add(file, f"{index:04d}.{name}.npy", values)

    def train_dataloader(self) -> DataLoader[Any]:
        return getattr(self, self.library)()

    def webdataset(self) -> DataLoader[Any]:
        import webdataset

        urls = f"{self.folder}/points-{{0..{SHARDS - 1}}}.tar"
        stream = webdataset.WebDataset(urls, shardshuffle=SHARDS, detshuffle=True, seed=3)
        return DataLoader(stream.shuffle(20, rng=random).decode().to_tuple("x.npy", "y.npy"), 12)

    def datasets(self) -> DataLoader[Any]:
        import datasets

        stream = datasets.IterableDataset.from_generator(_in_shards, gen_kwargs={"shards": list(range(SHARDS))})
        return DataLoader(stream.with_format("torch").shuffle(seed=1, buffer_size=20), 12, collate_fn=_as_pairs)

    def litdata(self) -> DataLoader[Any]:
        import litdata

        stream = litdata.StreamingDataset(str(self.folder / "chunks"), shuffle=True, seed=1)
        return litdata.StreamingDataLoader(stream, batch_size=12, collate_fn=default_collate)


def _add(file: tarfile.TarFile, name: str, values: Any) -> None:
    content = io.BytesIO()
    np.save(content, values)
    entry = tarfile.TarInfo(name)
    entry.size = content.tell()
    content.seek(0)
    file.addfile(entry, content)


@pytest.fixture
def task(request: pytest.FixtureRequest, folder: Path) -> list[str]:
    pytest.importorskip(request.param)
    folder.mkdir(exist_ok=True)
    data = [f"+data._target_={__name__}.Streamed", f"+data.library={request.param}", f"+data.folder={folder}"]
    return [*NOTHING, "~data", *data, "+module._target_=tests.support.loaders.AnyModule"]


@pytest.mark.parametrize("task", LIBRARIES, indirect=True)
@pytest.mark.parametrize("way", ["together", pytest.param("one by one", marks=pytest.mark.slow)])
def test_trains_the_same(way: str, task: list[str], pool: Pool, folder: Path) -> None:
    alone = fit(compose(folder / "one", *task, *WAYS[way]))
    assert len(alone.losses) == 2 * (COUNT // 12)
    check_equal(way, fit_ranks(compose(folder / "two", *task, *WAYS[way], *PLACES["ddp x2"]), pool), alone)


@pytest.mark.parametrize("task", LIBRARIES, indirect=True)
def test_goes_on_elsewhere(task: list[str], pool: Pool, folder: Path) -> None:
    task = [*task, *WAYS["together"]]
    whole = fit(compose(folder / "one", *task))
    pool.run(2, die, compose(folder / "two", *task, *PLACES["ddp x2"]), "on_train_batch_end", 11)
    check_resumed([fit(compose(folder / "two", *task, f"ckpt_path={folder}/two/died.ckpt"))], whole, 11)
