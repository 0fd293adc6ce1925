"""An elastic run goes on with the ranks that are left, grows back, and ends like the undisturbed one.

In test_elastic_trials.py other processes kill ranks, at random.
"""

from pathlib import Path

import pytest

from onecurve.records.events import read_events
from tests.support.commands import PARITY, TWO, callback, run, run_here, slow, steps
from tests.support.comparison import check_last_checkpoints, check_same_rows
from tests.support.runs import compose, fit


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_shrinks_and_grows_back(devices: int, small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 dies twice before the first checkpoint; its device returns after one."""
    monkeypatch.setattr("onecurve.launch.restarts._PAUSE", 0.2)  # seconds
    left = devices - 1
    waits = [callback("DieOnRankOne", at=8, kills=2), callback("WaitForSignal", at=13, world_size=left)]
    slowly = [slow(0.2), "+callbacks.slow.since=13"]  # so that the last steps take longer than a look for signals
    task = [*small, *PARITY, *waits, *slowly, "test=false", "launch.elastic=true", f"run_dir={folder}"]
    _, err = run_here(*task, "strategy=ddp", f"trainer.devices={devices}")
    assert err.count("rank 1 died (Signal 9 (SIGKILL)") == 2
    assert "restarting; 2 restarts left after this one" in err
    assert f"rank 1 died twice without a new checkpoint (device 1); going on with {left} of {devices} devices" in err
    assert f"device 1 is usable again; going on with {devices} of {devices} devices" in err
    events = read_events(folder)
    sizes = [event["world_size"] for event in events if event["event"] in ("start", "resume")]
    assert sizes == [devices, devices, left, devices]
    fit(compose(folder.parent / "undisturbed", *small, *PARITY))
    check_last_checkpoints(folder, folder.parent / "undisturbed")
    check_same_rows(folder, folder.parent / "undisturbed")
    assert steps(folder) == [*range(20)]


@pytest.mark.slow
def test_full_memory_makes_micro_batches_smaller(small: list[str], folder: Path) -> None:
    """Two ranks have 16 of 32 samples each, but room for 8 only."""
    task = [*small, *PARITY, *TWO, "test=false", "launch.elastic=true", f"run_dir={folder}"]
    _, err = run(*task, callback("SmallMemory", samples=8))
    assert "failed (OutOfMemoryError: 16 samples)" in err
    assert "restarting with trainer.accumulate_grad_batches=2" in err
    fit(compose(folder.parent / "undisturbed", *small, *PARITY))
    check_last_checkpoints(folder, folder.parent / "undisturbed")
    check_same_rows(folder, folder.parent / "undisturbed")
