"""Fixtures that every test may use: the ranks, and data small enough to train on in seconds."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from src.data.shapes import Shapes
from tests.pool import Pool

os.environ.setdefault("WANDB_MODE", "offline")
logging.getLogger("lightning").setLevel(logging.WARNING)
ALLOWED_SKIPS = {
    "tests/data/test_cifar.py::test_reads_the_real_pictures": "the pictures are not part of the project",
    "tests/launch/test_command_line.py::test_what_the_parent_finds_wrong[no gpu]": "there is a GPU",
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty run folder."""
    return tmp_path / "run"
