"""How an elastic run probes devices and waits for them, without processes: the clock and the probes are stand-ins."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from onecurve.launch import restarts
from onecurve.launch.restarts import time_of_last_save, unusable_devices, watch_for_devices
from onecurve.process.signals import FLAG_FILE
from tests.engine.launch.test_device_policy import config, policy_for


class Probe:
    """A process that ends after 0.04 seconds, if it ends, with the number of its device as exit code."""

    def __init__(self, command: str, env: dict[str, str], **options: Any) -> None:
        self.command, self.options, self.device = command, options, int(env["DEVICE"])
        self.has_path, self.was_killed = "PATH" in env, False
        self.looks, self.returncode = 0, cast(int | None, None)

    def poll(self) -> int | None:
        self.looks += 1
        if restarts.time.monotonic() > 0.04 and self.device < 90:
            self.returncode = self.device
        return self.returncode

    def kill(self) -> None:
        self.was_killed = True


class Clock:
    """A clock by which time passes only while somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Probe]:
    """Return the probes that are started."""
    started: list[Probe] = []

    def start(*arguments: Any, **options: Any) -> Probe:
        started.append(Probe(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(restarts, "time", Clock())
    monkeypatch.setattr(restarts.subprocess, "Popen", start)
    return started


def test_devices_whose_probe_fails(probes: list[Probe]) -> None:
    """The probe of device 95 never ends."""
    assert unusable_devices(config(launch__probe="test 1"), [0, 1, 95, 0, 2]) == {1, 95, 2}
    assert [probe.was_killed for probe in probes] == [False, False, True, False, False]
    assert {(probe.command, probe.has_path) for probe in probes} == {("test 1", True)}
    assert restarts.time.monotonic() == pytest.approx(90, abs=0.1)
    assert probes[2].looks == pytest.approx(90 / 0.05, abs=3)


@pytest.mark.parametrize(
    ("accelerator", "probe", "command", "is_silent"),
    [
        ("cpu", None, "true", True),
        ("cuda", None, 'exec {} -c "import torch; torch.ones(1, device=$DEVICE).item()"', True),
        ("auto", None, 'exec {} -c "import torch; torch.ones(1, device=$DEVICE).item()"', True),
        ("cpu", "test 1", "test 1", False),
        ("cuda", "test 1", "test 1", False),
    ],
)
def test_command_of_a_probe(
    accelerator: str,
    probe: str | None,
    command: str,
    is_silent: bool,
    probes: list[Probe],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/a path/python")
    unusable_devices(config(trainer__accelerator=accelerator, launch__probe=probe), [0])
    assert probes[0].command == command.format("'/a path/python'")
    errors = restarts.subprocess.DEVNULL if is_silent else None
    assert probes[0].options == {"shell": True, "stdout": restarts.subprocess.DEVNULL, "stderr": errors}


def test_a_probe_ends_at_its_deadline(probes: list[Probe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_POLL", 30.0)
    assert unusable_devices(config(), [95, 96]) == {95, 96}
    assert restarts.time.monotonic() == 90
    assert [probe.looks for probe in probes] == [4, 1]


def test_probes_end_with_the_run(probes: list[Probe]) -> None:
    assert unusable_devices(config(), [0, 95], lambda: True) == {0, 95}
    assert restarts.time.monotonic() == 0
    assert [probe.was_killed for probe in probes] == [True, True]


def test_time_of_the_last_save(tmp_path: Path) -> None:
    assert time_of_last_save(str(tmp_path)) == 0
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    os.utime(tmp_path / "checkpoints" / "last.ckpt", ns=(0, 12345))
    assert time_of_last_save(str(tmp_path)) == 12345


class Ended:
    """An event that is set after some waits, as if the ranks had ended; the watching thread runs at once."""

    def __init__(self, waits: int) -> None:
        self.waits, self.pauses = waits, []  # type: ignore[var-annotated]

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return self.is_set() or len(self.pauses) > self.waits

    def is_set(self) -> bool:
        return len(self.pauses) > self.waits

    def set(self) -> None:
        self.waits = -1


@pytest.mark.parametrize(
    ("used", "saves", "unusable", "waits", "asks"),
    [
        ([0, 1], [0, 5], set(), 3, True),
        ([0, 1], [0, 5], {3}, 1, True),
        ([0, 1], [0, 5, 5], {2, 3}, 2, False),
        ([0, 1], [5, 5, 5], set(), 2, False),
        ([0, 1], [5, 4, 4], set(), 2, False),
        ([0, 1], [5, 5, 6], set(), 2, True),
        ([0, 1, 2, 3], [0], set(), 1, False),
        ([0, 1], [0], set(), 0, False),
    ],
)
def test_asks_the_ranks_to_end_once_devices_are_back(
    used: list[int],
    saves: list[int],
    unusable: set[int],
    waits: int,
    asks: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FLAG_FILE, str(tmp_path / "stop"))
    times, ended = iter(saves), Ended(waits)
    monkeypatch.setattr(restarts, "time_of_last_save", lambda run_dir: next(times))
    started: list[Any] = []
    asked: list[Any] = []

    def probe(cfg: Any, idle: list[int], is_over: Any) -> set[int]:
        asked.append(idle)
        return unusable

    monkeypatch.setattr(restarts, "unusable_devices", probe)

    def thread(target: Any, daemon: bool) -> Any:
        return SimpleNamespace(start=target, join=lambda: started.append(daemon))

    monkeypatch.setattr(restarts, "threading", SimpleNamespace(Event=lambda: ended, Thread=thread))
    policy = policy_for()
    policy.used, policy.pause = used, 7.0
    with suppress(KeyError), watch_for_devices(config(), policy):
        assert (tmp_path / "stop.resize").exists() == asks
        raise KeyError
    assert not (tmp_path / "stop.resize").exists()
    assert started == [True]
    assert set(ended.pauses) <= {7.0}
    assert asked == [[2, 3]] * len(asked)
    assert ended.waits == -1


def test_devices_that_come_back_when_the_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLAG_FILE, str(tmp_path / "stop"))
    times, ended = iter([0, 5]), Ended(1)
    monkeypatch.setattr(restarts, "time_of_last_save", lambda run_dir: next(times))

    def probe(cfg: Any, idle: list[int], is_over: Any) -> set[int]:
        ended.set()
        return set()

    monkeypatch.setattr(restarts, "unusable_devices", probe)
    thread = SimpleNamespace(
        Event=lambda: ended, Thread=lambda target, daemon: SimpleNamespace(start=target, join=list)
    )
    monkeypatch.setattr(restarts, "threading", thread)
    policy = policy_for()
    policy.used = [0, 1]
    with watch_for_devices(config(), policy):
        assert not (tmp_path / "stop.resize").exists()
