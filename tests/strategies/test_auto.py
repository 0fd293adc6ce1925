"""The default strategy: none on one device, DDP on several, however they are given."""

from pathlib import Path

import pytest
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf

from src.launch.rank import drives_all_devices
from src.strategies.auto import auto


@pytest.mark.parametrize(("devices", "num_nodes"), [(1, 1), ([3], 1)])
def test_one_device_needs_none(devices: int | list[int], num_nodes: int) -> None:
    assert auto(devices, num_nodes) == "auto"


@pytest.mark.parametrize(("devices", "num_nodes"), [(2, 1), ([0, 1], 1), (1, 2)])
def test_several_are_ddp(devices: int | list[int], num_nodes: int) -> None:
    assert isinstance(auto(devices, num_nodes), DDPStrategy)


@pytest.mark.parametrize(
    ("line", "expected"),
    [("class Mine(DDPSpawn): ...", True), ("class Mine(DDP): ...", False), ("Mine = DDP", False)],
)
def test_drives_all_devices_as_what_it_inherits_from(
    line: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is read in the source, and not asked of the class."""
    imports = "from src.strategies.ddp import DDP\nfrom src.strategies.ddp_spawn import DDPSpawn\n"
    (tmp_path / f"mine{len(line)}.py").write_text(f"{imports}{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert drives_all_devices(OmegaConf.create({"strategy": {"_target_": f"mine{len(line)}.Mine"}})) == expected
