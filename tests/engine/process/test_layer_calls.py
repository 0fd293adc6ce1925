"""Ranks that call different layers are told apart from those that have come less far."""

from pathlib import Path

import pytest
import torch
from torch import nn

from onecurve.process.layer_calls import _KEPT, first_different_calls, record_layer_calls
from onecurve.process.log import REPORT_FILE


def call(folder: Path, rank: int, layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call layers by their numbers as a rank that the launcher has started."""
    parts = {f"net.{name}": nn.Identity() for name in range(3)}
    (folder / str(rank)).mkdir(parents=True)
    monkeypatch.setenv(REPORT_FILE, f"{folder}/{rank}/error.json")
    record_layer_calls(dict(parts))
    for name in layers:
        parts[f"net.{name}"](torch.zeros(1))


@pytest.mark.parametrize(
    ("calls", "difference"),
    [
        (["012", "012"], ""),
        (["012", "01"], ""),  # it is behind
        (["012", ""], ""),
        (["012", "02"], "rank 0 called net.1, but rank 1 called net.2"),
        (["012", "02", "012"], "rank 0 and 2 called net.1, but rank 1 called net.2"),
        (["012" * _KEPT + "12", "012" * _KEPT + "02"], "rank 0 called net.1, but rank 1 called net.0"),
    ],
)
def test_the_first_difference(
    calls: list[str], difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, layers in enumerate(calls):
        call(tmp_path, rank, layers, monkeypatch)
    assert first_different_calls(tmp_path) == difference


def test_a_network_that_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer has no successor, but the network ends."""

    class Net(nn.Module):
        def __init__(self, is_whole: bool) -> None:
            super().__init__()
            self.last, self.is_whole = nn.Identity(), is_whole

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x) if self.is_whole else x

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv(REPORT_FILE, f"{tmp_path}/{rank}/error.json")
        net = Net(is_whole=rank == 0)
        record_layer_calls({"net": net, "net.last": net.last})
        net(torch.zeros(1))
    assert first_different_calls(tmp_path) == "rank 0 called net.last, but rank 1 left net"


def test_a_rank_of_another_launcher_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPORT_FILE, raising=False)
    layer = nn.Identity()
    record_layer_calls({"layer": layer})
    assert not layer._forward_hooks
