"""Fixtures that every test may use: the ranks, and data small enough to train on in seconds."""

import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from src.data.cifar import CIFAR10, CIFAR100
from src.data.shapes import Shapes
from tests.memory import give_back, keep_none
from tests.pool import Pool

os.environ.setdefault("WANDB_MODE", "offline")
logging.getLogger("lightning").setLevel(logging.WARNING)
ALLOWED_SKIPS = {
    "tests/data/test_cifar.py::test_reads_the_real_pictures": "the pictures are not part of the project",
    "tests/launch/test_command_line.py::test_what_the_parent_finds_wrong[no gpu]": "there is a GPU",
    "tests/launch/test_slurm.py": "SLURM is not installed",
    "tests/launch/test_two_hosts.py": "network namespaces take root, and iproute2",
    "tests/test_waits.py::test_nothing_waits_on_a_gpu": "there is no GPU",
    "tests/models/test_classifier.py::test_compiled": "there is no C++ compiler",
}
UNEXPECTED_SKIPS: list[str] = []
SIZES = {"train_size": 400, "test_size": 90}  # 360 to train on: no batch of 32 divides it


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Fail the session on a skip that is not on the committed list."""
    if report.skipped and not any(report.nodeid.startswith(known) for known in ALLOWED_SKIPS):
        UNEXPECTED_SKIPS.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if UNEXPECTED_SKIPS:
        print(f"\nskipped, but not on the list in {Path(__file__).name}: {', '.join(UNEXPECTED_SKIPS)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    """A run of one rank in this process keeps its port, and Lightning leaves that in the environment for the next."""
    keep_none()
    yield
    give_back()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks that wait for jobs."""
    ranks = Pool(4)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that train on a few hundred drawn shapes."""
    root = tmp_path_factory.mktemp("data")
    Shapes(**SIZES).prepare(root)
    return ["data=shapes", f"data.root={root}", *(f"data.source.{name}={size}" for name, size in SIZES.items())]


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few random pictures in the official layout of both data sets."""
    root, rng = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    for kind, classes in ((CIFAR10, 10), (CIFAR100, 100)):
        for names in kind.members.values():
            for name in names:
                rows = rng.integers(0, 256, (10 * classes, 3072), dtype=np.uint8)
                batch = {b"data": rows, kind.label_key: [i % classes for i in range(len(rows))]}
                (root / kind.archive.folder).mkdir(exist_ok=True)
                (root / kind.archive.folder / name).write_bytes(pickle.dumps(batch, protocol=4))
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty run folder."""
    return tmp_path / "run"
