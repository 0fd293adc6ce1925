"""The timer of a rank ends a hang before the process groups do."""

import faulthandler
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from src.engine.run.stopping import Watchdog
from src.engine.utils.process import stack_file


@pytest.fixture
def watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    callback = Watchdog(tmp_path, 1000.0)
    yield callback
    callback.teardown(None, None, "fit")


def start(watchdog: Watchdog, rank: int = 0) -> None:
    watchdog.setup(SimpleNamespace(global_rank=rank), None, "fit")  # type: ignore[arg-type]


def test_process_groups_wait_for_the_timer(watchdog: Watchdog) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    start(watchdog)
    for group in [dist.group.WORLD, *mesh.get_all_groups()]:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        assert timeout == timedelta(seconds=1000, minutes=5)


def test_only_a_hang_leaves_a_file(watchdog: Watchdog, tmp_path: Path) -> None:
    """A stopped process leaves it empty."""
    start(watchdog, rank=3)
    assert stack_file(tmp_path, 3).read_text() == ""
    watchdog.on_exception(None, None, RuntimeError())  # type: ignore[arg-type]
    assert not stack_file(tmp_path, 3).exists()


def test_a_restart_keeps_the_stacks_of_a_hang(watchdog: Watchdog, tmp_path: Path) -> None:
    """Under torchrun and SLURM nothing else shows them."""
    stack_file(tmp_path, 0).parent.mkdir()
    stack_file(tmp_path, 0).write_text("Timeout (0:00:08)!\n")
    start(watchdog)
    watchdog.teardown(None, None, "fit")
    assert stack_file(tmp_path, 0).read_text() == "Timeout (0:00:08)!\n"
