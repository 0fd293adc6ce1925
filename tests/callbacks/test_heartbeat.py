"""The watchdog of a rank ends a hang before the process groups do, and records how far the rank is."""

import faulthandler
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from src.callbacks.heartbeat import Heartbeat
from src.utils.rank_log import batches_file


@pytest.fixture
def heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    callback = Heartbeat(tmp_path, 1000.0)
    yield callback
    callback.teardown(None, None, "fit")  # type: ignore[arg-type]


def arm(heartbeat: Heartbeat, rank: int = 0) -> None:
    heartbeat.setup(SimpleNamespace(global_rank=rank), None, "fit")  # type: ignore[arg-type]


def test_process_groups_wait_for_the_watchdog(heartbeat: Heartbeat) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    arm(heartbeat)
    for group in [dist.group.WORLD, *mesh.get_all_groups()]:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        assert timeout == timedelta(seconds=1000, minutes=5)


def test_records_the_number_of_batches(heartbeat: Heartbeat, tmp_path: Path) -> None:
    file = batches_file(tmp_path, 3)
    file.parent.mkdir()
    file.write_text(f"{10**6:>12}\n")  # of an earlier start
    arm(heartbeat, rank=3)
    assert int(file.read_text()) == 0
    for hook in ("train", "validation", "train"):
        getattr(heartbeat, f"on_{hook}_batch_start")()
    heartbeat.on_save_checkpoint()
    assert int(file.read_text()) == 3
