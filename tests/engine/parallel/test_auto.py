"""The default strategy is Lightning's on one device, and DDP on several."""

import pytest
from lightning.pytorch.strategies import DDPStrategy

from src.engine.parallel.ddp import auto


@pytest.mark.parametrize(("devices", "num_nodes"), [(1, 1), ([3], 1)])
def test_one_device_runs_without_a_strategy(devices: int | list[int], num_nodes: int) -> None:
    assert auto(devices, num_nodes) == "auto"


@pytest.mark.parametrize(("devices", "num_nodes"), [(2, 1), ([0, 1], 1), (1, 2)])
def test_several_devices_run_ddp(devices: int | list[int], num_nodes: int) -> None:
    assert isinstance(auto(devices, num_nodes), DDPStrategy)
