"""The timer of a rank ends a hang before the process groups do."""

import faulthandler
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from onecurve.process.log import REPORT_FILE
from onecurve.process.signals import Stopped
from onecurve.run.stopping import Watchdog


def test_process_groups_wait_for_the_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    watchdog = Watchdog(tmp_path, 1000.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    watchdog.setup(SimpleNamespace(global_rank=0), None, "fit")  # type: ignore[arg-type]
    for group in [dist.group.WORLD, *mesh.get_all_groups()]:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        assert timeout == timedelta(seconds=1000, minutes=5)
    later: Any = dist.new_group([0])
    watchdog.on_fit_start(None, None)
    assert later._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=1000, minutes=5)
    watchdog.teardown(None, None, "fit")


@pytest.mark.parametrize("error", [RuntimeError("only here"), Stopped(15)], ids=["error", "stop"])
def test_an_error_is_reported_before_callbacks_handle_it(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback that saves a checkpoint would wait for the other ranks until launch.timeout."""
    timers: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: timers.append(seconds))
    monkeypatch.setenv(REPORT_FILE, str(tmp_path / "error.json"))
    watchdog = Watchdog(tmp_path, 1000.0)
    watchdog.setup(SimpleNamespace(global_rank=1), None, "fit")  # type: ignore[arg-type]
    watchdog.on_exception(None, None, error)  # type: ignore[arg-type]
    watchdog._restart_timer()
    if isinstance(error, Stopped):
        assert timers == [1000.0]
        return
    watchdog.on_exception(None, None, ValueError("a later one"))  # type: ignore[arg-type]
    assert timers == [1000.0, 20.0]
    assert "RuntimeError: only here" in (tmp_path / "error.json").read_text()


def test_a_prompt_has_no_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the kernel of a notebook while a debugger waits for the user."""
    timers: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: timers.append(seconds))
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    watchdog = Watchdog(tmp_path, 1000.0)
    watchdog.setup(SimpleNamespace(global_rank=0), None, "fit")  # type: ignore[arg-type]
    watchdog._restart_timer()
    watchdog.on_exception(None, None, ValueError())  # type: ignore[arg-type]
    assert timers == []
