"""The timer of a rank ends a hang before the process groups do."""

import faulthandler
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from src.engine.run.stopping import Watchdog


def test_process_groups_wait_for_the_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    watchdog = Watchdog(tmp_path, 1000.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    watchdog.setup(SimpleNamespace(global_rank=0), None, "fit")  # type: ignore[arg-type]
    for group in [dist.group.WORLD, *mesh.get_all_groups()]:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        assert timeout == timedelta(seconds=1000, minutes=5)
    watchdog.teardown(None, None, "fit")
