"""The decisions of an elastic run, without processes: each expected choice was worked out by hand."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from src.engine.launch import elastic
from src.engine.launch.elastic import (
    DevicePolicy,
    time_of_last_save,
    unusable_devices,
    watch_for_devices,
    with_devices,
    with_smaller_micro_batches,
)
from src.engine.utils.errors import UserError
from src.engine.utils.signals import FLAG_FILE

ANY = range(100)  # the numbers of ranks that a strategy accepts


class Even:
    """A strategy for an even number of ranks, with virtual ranks of which each rank has two."""

    def check_world_size(self, size: int) -> None:
        if size % 2:
            raise UserError(f"{size} is odd")

    def check_virtual_ranks(self, count: int, size: int) -> None:
        if count != 2 * size:
            raise UserError(f"{count} virtual ranks of {size}")


class Plain:
    """A strategy for any number of ranks, with one option."""

    def __init__(self, devices: int = 0) -> None:
        self.devices = devices


def config(**changes: Any) -> DictConfig:
    """Return a resolved configuration, with other values for some dotted names."""
    cfg = OmegaConf.create(
        {
            "launch": {"max_restarts": 2, "min_devices": 1, "probe": None},
            "trainer": {"devices": 4, "accelerator": "cpu", "accumulate_grad_batches": 2},
            "strategy": {"_target_": f"{__name__}.Plain"},
            "runtime": {"chooses_strategy": False, "world_size": 4},
            "data": {"batch_size": 64},
            "bit_exact": False,
            "virtual_ranks": 4,
            "run_dir": "unused",
        }
    )
    for name, value in changes.items():
        OmegaConf.update(cfg, name.replace("__", "."), value, force_add=True)
    return cfg


def policy_for(count: int = 4, sizes: Any = ANY, **changes: Any) -> DevicePolicy:
    policy = DevicePolicy(list(range(count)), config(**changes))
    policy.accepts = lambda size: size in sizes  # type: ignore[method-assign]
    return policy


def test_a_policy_begins_with_all_devices() -> None:
    policy = DevicePolicy([5, 7], config())
    assert (policy.used, policy.restarts_left, policy.pause) == ([5, 7], 2, elastic._PAUSE)


@pytest.mark.parametrize(
    ("lost", "sizes", "min_devices", "expected"),
    [
        (set(), {4}, 1, [0, 1, 2, 3]),
        (set(), {}, 1, [0, 1, 2, 3]),
        (set(), {}, 4, [0, 1, 2, 3]),
        ({1}, ANY, 1, [0, 2, 3]),
        ({1}, {1, 2}, 1, [0, 2]),
        ({1}, ANY, 3, [0, 2, 3]),
        ({0, 1, 2}, ANY, 1, [3]),
        ({0, 1, 2}, ANY, 0, [3]),
        ({0, 1, 2}, {1}, -1, [3]),
    ],
)
def test_chooses_as_many_devices_as_possible(lost: set[int], sizes: Any, min_devices: int, expected: list[int]) -> None:
    assert policy_for(4, sizes, launch__min_devices=min_devices).choose(lost) == expected


@pytest.mark.parametrize(
    ("lost", "sizes", "min_devices", "left"),
    [({1, 2}, ANY, 3, 2), ({1}, {1, 2}, 3, 3), ({1}, {4}, 1, 3), ({0, 1, 2, 3}, {0}, 0, 0)],
)
def test_too_few_devices_are_an_error(lost: set[int], sizes: Any, min_devices: int, left: int) -> None:
    with pytest.raises(UserError) as caught:
        policy_for(4, sizes, launch__min_devices=min_devices).choose(lost, "why")
    assert str(caught.value) == (
        f"why: {left} of 4 devices are left, too few for launch.min_devices={min_devices} and for the strategy"
    )


def test_a_second_death_of_a_rank_loses_its_device() -> None:
    policy = policy_for()
    assert policy.after_failure(1, 5, set()) == ""
    assert (policy.used, policy.restarts_left, policy.pause) == ([0, 1, 2, 3], 1, elastic._PAUSE)
    assert policy.after_failure(1, 5, set()) == "rank 1 died twice without a new checkpoint (device 1)"
    assert (policy.used, policy.restarts_left, policy.pause) == ([0, 2, 3], 2, 2 * elastic._PAUSE)
    policy.after_failure(1, 5, set())
    assert policy.after_failure(1, 5, set()) == "rank 1 died twice without a new checkpoint (device 2)"
    assert policy.used == [0, 3]


def test_a_device_that_is_lost_was_not_also_a_suspect() -> None:
    """When it comes back, its first death restarts on it."""
    policy = policy_for()
    policy.after_failure(1, 5, set())
    policy.after_failure(1, 5, set())
    assert policy.after_probe(set()) == "device 1 is usable again"
    assert policy.after_failure(1, 5, set()) == ""
    assert policy.used == [0, 1, 2, 3]


def test_an_unusable_device_is_the_reason_of_a_second_death() -> None:
    policy = policy_for()
    policy.after_failure(1, 5, set())
    assert policy.after_failure(1, 5, {1}) == "device 1 is unusable"
    assert policy.after_failure(0, 5, {1, 0}) == "device 0 is unusable", "that of a lost one is known"
    assert policy.used == [2, 3]


@pytest.mark.parametrize(("saved_at", "expected"), [(4, 0), (5, 0), (6, 1)])
def test_a_newer_checkpoint_gives_all_restarts_back(saved_at: int, expected: int) -> None:
    policy = policy_for()
    policy.after_failure(None, 5, set())
    policy.after_failure(None, saved_at, set())
    assert policy.restarts_left == expected


def test_a_newer_checkpoint_forgets_deaths_once() -> None:
    policy = policy_for()
    for dead_rank, saved_at in [(1, 5), (1, 6), (2, 6)]:
        assert policy.after_failure(dead_rank, saved_at, set()) == ""
    assert policy.after_failure(1, 6, set()) != ""


def test_a_death_before_the_first_checkpoint_counts() -> None:
    policy = policy_for()
    assert policy.after_failure(0, 0, set()) == ""
    assert policy.after_failure(0, 0, set()) == "rank 0 died twice without a new checkpoint (device 0)"
    policy = policy_for()
    policy.after_failure(0, 0, set())
    assert policy.after_failure(0, 1, set()) == "", "that is the first checkpoint"


def test_restarts_run_out() -> None:
    policy = policy_for(launch__max_restarts=0)
    policy.after_failure(None, 0, set())
    assert policy.restarts_left == -1


def test_a_probe_tells_the_changes() -> None:
    policy = policy_for()
    assert policy.after_probe(set()) == ""
    assert policy.after_probe({3, 1}) == "device 1 is unusable, device 3 is unusable"
    assert policy.used == [0, 2]
    assert policy.after_probe({0, 1}) == "device 0 is unusable, device 3 is usable again"
    assert policy.used == [2, 3]


@pytest.mark.parametrize(
    ("strategy", "changes", "expected"),
    [
        ("Plain", {}, [1, 2, 3, 4]),
        ("Even", {}, [2, 4]),
        ("Even", {"runtime__chooses_strategy": True}, [1, 2, 3, 4]),
        ("Even", {"bit_exact": True}, [2]),
        ("Even", {"bit_exact": True, "virtual_ranks": 8}, [4]),
        ("Plain", {"bit_exact": True}, [1]),
        ("Plain", {"strategy__single_process": True, "strategy__devices": 2}, [1, 2, 3, 4]),
    ],
)
def test_sizes_that_a_strategy_accepts(strategy: str, changes: dict[str, Any], expected: list[int]) -> None:
    policy = DevicePolicy([0, 1, 2, 3], config(strategy___target_=f"{__name__}.{strategy}", **changes))
    assert [size for size in range(1, 5) if policy.accepts(size)] == expected


def test_a_mistake_in_the_strategy_is_no_refusal() -> None:
    policy = DevicePolicy([0, 1], config(strategy___target_=f"{__name__}.Even"))
    with pytest.raises(TypeError):
        policy.accepts(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("accelerator", "expected"), [("cpu", 3), ("cuda", [0, 2, 3]), ("auto", [0, 2, 3])])
def test_configuration_for_other_devices(accelerator: str, expected: Any) -> None:
    cfg = config(trainer__accelerator=accelerator, strategy__devices=4)
    fewer = with_devices(cfg, [0, 2, 3])
    assert fewer.trainer.devices == fewer.strategy.devices == expected
    assert fewer.runtime.world_size == 3
    assert (cfg.trainer.devices, cfg.strategy.devices, cfg.runtime.world_size) == (4, 4, 4)
    assert "devices" not in with_devices(config(), [0]).strategy


@pytest.mark.parametrize(
    ("changes", "normalizes", "expected"),
    [
        ({}, True, 4),
        ({"virtual_ranks": 8, "trainer__accumulate_grad_batches": 4}, True, 8),
        ({"virtual_ranks": 2}, True, 2),
        ({"virtual_ranks": 2}, False, 4),
        ({"virtual_ranks": 2, "data__batch_size": 66}, False, 2),
        ({"virtual_ranks": 2, "data__batch_size": 16}, False, 4),
        ({"virtual_ranks": 2, "data__batch_size": 12}, False, 2),
        ({"virtual_ranks": 2, "data__batch_size": 4, "runtime__world_size": 1}, False, 4),
        ({"virtual_ranks": 2, "data__batch_size": None}, False, 2),
        ({"virtual_ranks": 4, "data__batch_size": None}, False, 4),
        ({"virtual_ranks": 4, "strategy__microbatches": 2}, True, 2),
        ({"virtual_ranks": 8, "strategy__microbatches": 2}, True, 4),
        ({"virtual_ranks": 2, "strategy__microbatches": 4, "data__batch_size": 64}, False, 4),
        ({"virtual_ranks": 2, "strategy__microbatches": 4, "data__batch_size": 32}, False, 2),
        ({"bit_exact": True}, False, 2),
    ],
)
def test_smaller_micro_batches(changes: dict[str, Any], normalizes: bool, expected: int) -> None:
    cfg = config(**changes)
    before = cfg.copy()
    assert with_smaller_micro_batches(cfg, normalizes).trainer.accumulate_grad_batches == expected
    assert cfg == before


class Probe:
    """A process that ends after 0.04 seconds, if it ends, with the number of its device as exit code."""

    def __init__(self, command: str, env: dict[str, str], **options: Any) -> None:
        self.command, self.options, self.device = command, options, int(env["DEVICE"])
        self.has_path, self.was_killed = "PATH" in env, False
        self.looks, self.returncode = 0, None

    def poll(self) -> int | None:
        self.looks += 1
        if elastic.time.monotonic() > 0.04 and self.device < 90:
            self.returncode = self.device
        return self.returncode

    def kill(self) -> None:
        self.was_killed = True


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Probe]:
    """Return the probes that are started; time passes only while one is awaited."""
    started: list[Probe] = []

    def start(*arguments: Any, **options: Any) -> Probe:
        started.append(Probe(*arguments, **options))
        return started[-1]

    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(elastic, "time", clock)
    monkeypatch.setattr(elastic.subprocess, "Popen", start)
    return started


def test_devices_whose_probe_fails(probes: list[Probe]) -> None:
    """A device above 90 never answers."""
    assert unusable_devices(config(launch__probe="test 1"), [0, 1, 95, 0, 2]) == {1, 95, 2}
    assert [probe.was_killed for probe in probes] == [False, False, True, False, False]
    assert {(probe.command, probe.has_path) for probe in probes} == {("test 1", True)}
    assert elastic.time.monotonic() == pytest.approx(90, abs=0.1)
    assert probes[2].looks == pytest.approx(90 / 0.05, abs=3)


@pytest.mark.parametrize(
    ("accelerator", "probe", "command", "is_silent"),
    [
        ("cpu", None, "true", True),
        ("cuda", None, 'exec {} -c "import torch; torch.ones(1, device=$DEVICE).item()"', True),
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
    errors = elastic.subprocess.DEVNULL if is_silent else None
    assert probes[0].options == {"shell": True, "stdout": elastic.subprocess.DEVNULL, "stderr": errors}


def test_probes_end_with_the_run(probes: list[Probe]) -> None:
    assert unusable_devices(config(), [0, 95], lambda: True) == {0, 95}
    assert elastic.time.monotonic() == 0
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
        ([0, 1], [0, 5], set(), 1, True),
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
    times, ended, asked = iter(saves), Ended(waits), []
    monkeypatch.setattr(elastic, "time_of_last_save", lambda run_dir: next(times))
    monkeypatch.setattr(elastic, "unusable_devices", lambda cfg, idle, is_over: asked.append(idle) or unusable)
    started: list[Any] = []

    def thread(target: Any, daemon: bool) -> Any:
        return SimpleNamespace(start=target, join=lambda: started.append(daemon))

    monkeypatch.setattr(elastic, "threading", SimpleNamespace(Event=lambda: ended, Thread=thread))
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
    monkeypatch.setattr(elastic, "time_of_last_save", lambda run_dir: next(times))
    monkeypatch.setattr(elastic, "unusable_devices", lambda cfg, idle, is_over: ended.set() or set())
    thread = SimpleNamespace(
        Event=lambda: ended, Thread=lambda target, daemon: SimpleNamespace(start=target, join=list)
    )
    monkeypatch.setattr(elastic, "threading", thread)
    policy = policy_for()
    policy.used = [0, 1]
    with watch_for_devices(config(), policy):
        assert not (tmp_path / "stop.resize").exists()
