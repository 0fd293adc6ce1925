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
SIZES = {"train_size": 400, "test_size": 90}  # 360 to train on: no batch of 32 divides it


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
