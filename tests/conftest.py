"""Fixtures of all tests: the ranks, data small enough to train on in seconds, and runs of one process."""

import functools
import logging
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from PIL import Image

from src.data.sources.cifar import CIFAR10, CIFAR100
from src.data.sources.shapes import Shapes
from tests.support.choices import IMAGES
from tests.support.experiments import SHORT_RUN, SIZES
from tests.support.huggingface import save_to_disk, use_stand_in
from tests.support.memory import prepare_for_many_tests, release_memory
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit_and_test, fit_ranks

LONGEST = ("engine/faults", "engine/extras", "engine/gpu", "engine/bits", "engine/config", "template", "guide")
pytest_plugins = ["tests.support.report"]
os.environ.setdefault("WANDB_MODE", "offline")
logging.getLogger("lightning").setLevel(logging.WARNING)
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds that a worker of a forgotten loader has to end
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # type: ignore[misc]  # Hydra reads 20 files a run
torch.set_num_threads(1)  # the networks are tiny, and the ranks of the pool need the other core


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the folders whose files take longest: the last files of a session leave a core idle."""
    items.sort(key=lambda item: not str(item.path.relative_to(Path(__file__).parent)).startswith(LONGEST))


def pytest_collection_finish() -> None:
    prepare_for_many_tests()


@pytest.fixture(autouse=True)
def _own_random_numbers() -> None:
    """Let weights and data of a test not depend on the tests that ran before it in this process."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove what a run leaves in this process: its process group, its variables, its memory and options of torch."""
    yield
    if "folder" in request.fixturenames:
        release_memory()
    if dist.is_initialized():
        dist.destroy_process_group()
    if torch.are_deterministic_algorithms_enabled():  # Lightning enables them with deterministic=True
        torch.use_deterministic_algorithms(False)
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "PL_GLOBAL_SEED"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks that wait for jobs."""
    ranks = Pool(4)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return overrides that train on a few hundred synthetic shapes."""
    root = tmp_path_factory.mktemp("data")
    Shapes(**SIZES).prepare(root)
    return ["data=shapes", f"data.root={root}", *(f"data.source.{name}={size}" for name, size in SIZES.items())]


@pytest.fixture(scope="session")
def alone(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Record]:
    """Return a function that makes the short run in one process, with a test, once for each choice of options."""

    @functools.cache
    def run(*options: str) -> Record:
        return fit_and_test(compose(tmp_path_factory.mktemp("alone"), *small, *SHORT_RUN, *options))

    return run


@pytest.fixture
def short_run(pool: Pool, small: list[str], folder: Path) -> Callable[..., list[Record]]:
    """Return a function that makes the short run in `folder`, with a test; it returns the record of each rank."""
    return lambda *options: fit_ranks(compose(folder, *small, *SHORT_RUN, *options), pool, test=True)


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a few random images in the official layout of both datasets."""
    root, rng = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    for kind, classes in ((CIFAR10, 10), (CIFAR100, 100)):
        for names in kind.members.values():
            for name in names:
                rows = rng.integers(0, 256, (10 * classes, 3072), dtype=np.uint8)
                batch = {b"data": rows, kind.label_key: [i % classes for i in range(len(rows))]}
                (root / kind.archive.folder).mkdir(exist_ok=True)
                (root / kind.archive.folder / name).write_bytes(pickle.dumps(batch, protocol=4))
    return root


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same random images in folders per class, `arrays.npz`, and `hub`.

    Training and test set have ten and five images of each of ten classes.
    """
    root, rng, arrays = tmp_path_factory.mktemp("images"), np.random.default_rng(0), {}
    for split, count in (("train", 10), ("test", 5)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (10 * count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.repeat(np.arange(10), count)
        for number, (image, label) in enumerate(zip(arrays[f"x_{split}"], arrays[f"y_{split}"], strict=True)):
            file = root / split / f"class {label}" / f"{number:03d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    np.savez(root / "arrays.npz", **arrays)  # type: ignore[arg-type]
    save_to_disk(root / "hub", arrays)
    return root


@pytest.fixture
def hub(images: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the folder of a dataset of Hugging Face, which the library or its stand-in reads in this process."""
    use_stand_in(monkeypatch)
    return f"{images}/hub"


@pytest.fixture
def local_data(small: list[str], cifar: Path, images: Path, hub: str) -> dict[str, list[str]]:
    """Return the overrides that read each dataset of `choices.LOCAL_DATA` from this machine."""
    return {name: [f"data={name}", f"data.root={cifar if 'cifar' in name else images}"] for name in IMAGES} | {
        "shapes": small,
        "brackets": ["data=brackets", "data.train_size=90"],
        "huggingface": ["data=huggingface", f"data.source.name={hub}"],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the path of a run folder that does not exist yet."""
    return tmp_path / "run"
