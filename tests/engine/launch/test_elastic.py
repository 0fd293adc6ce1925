"""The devices of an elastic run: which remain after failures, which come back, and what the launcher refuses."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from onecurve.errors import RankFailedError, UserError
from onecurve.launch import start as launching
from onecurve.launch.restarts import (
    DevicePolicy,
    next_start,
    unusable_devices,
    with_devices,
    with_smaller_micro_batches,
)
from onecurve.records.events import append_event, read_events
from tests.support.runs import compose

Failure = tuple[int | None, int, set[int], str]
EVERY, EVEN = (1, 2, 3, 4), (2, 4)  # the sizes that a strategy accepts

# Failures in turn, each as the dead rank, the time of the newest checkpoint, and the devices whose probe fails; after
# each one the expected devices, as digits, or "end" for an error, or "give up" after one restart too many.
SEQUENCES: dict[str, tuple[tuple[int, ...], list[Failure]]] = {
    "first death": (EVERY, [(1, 5, set(), "0123")]),
    "second death of a rank": (EVERY, [(1, 5, set(), "0123"), (1, 5, set(), "023")]),
    "two ranks in turn": (EVERY, [(1, 5, set(), "0123"), (2, 5, set(), "0123"), (1, 5, set(), "023")]),
    "second death after progress": (EVERY, [(1, 5, set(), "0123"), (1, 9, set(), "0123")]),
    "a rank above a lost one": (EVERY, [(1, 5, {1}, "023"), (2, 5, set(), "023"), (2, 5, set(), "02")]),
    "suspects outlive a change": (EVERY, [(3, 5, set(), "0123"), (1, 5, {1}, "023"), (2, 5, set(), "02")]),
    "unusable device": (EVERY, [(1, 5, {1}, "023")]),
    "unusable device of an error": (EVERY, [(None, 5, {0, 2}, "13")]),
    "errors never shrink": (EVERY, [(None, 0, set(), "0123"), (None, 0, set(), "0123"), (None, 0, set(), "give up")]),
    "errors with progress": (
        EVERY,
        [(None, 1, set(), "0123"), (None, 2, set(), "0123"), (None, 3, set(), "0123")],
    ),
    "shrinking is no restart": (EVERY, [(0, 0, {0}, "123"), (0, 0, {1}, "23"), (0, 0, {2}, "3")]),
    "a pipeline loses a replica": (EVEN, [(3, 5, {3}, "01")]),
    "its spare device replaces another": (EVEN, [(3, 5, {3}, "01"), (0, 5, {0}, "12"), (0, 5, {1}, "end")]),
    "none left": (EVERY, [(0, 5, {0, 1, 2, 3}, "end")]),
}


def policy_for(sizes: tuple[int, ...], min_devices: int = 1) -> DevicePolicy:
    """Return the policy of four devices and two restarts, with a strategy that accepts these sizes."""
    cfg = Mock(launch=SimpleNamespace(max_restarts=2, min_devices=min_devices))
    policy = DevicePolicy([0, 1, 2, 3], cfg)
    policy.accepts = sizes.__contains__  # type: ignore[assignment,method-assign]
    return policy


@pytest.mark.parametrize("name", SEQUENCES)
def test_devices_after_failures(name: str) -> None:
    sizes, failures = SEQUENCES[name]
    policy = policy_for(sizes)
    for dead_rank, saved_at, unusable, expected in failures:
        before = policy.used
        if expected == "end":
            with pytest.raises(UserError, match="devices are left, too few"):
                policy.after_failure(dead_rank, saved_at, unusable)
            return
        reason = policy.after_failure(dead_rank, saved_at, unusable)
        if expected == "give up":
            assert policy.restarts_left < 0
            return
        assert "".join(map(str, policy.used)) == expected
        assert bool(reason) == (policy.used != before)
        assert policy.restarts_left >= 0


def test_ends_below_min_devices() -> None:
    policy = policy_for(EVERY, min_devices=3)
    policy.after_failure(0, 5, {0})
    with pytest.raises(UserError, match="1 is unusable: 2 of 4 devices are left, too few"):
        policy.after_failure(0, 5, {0, 1})


def test_grows_back_by_as_many_as_the_strategy_accepts() -> None:
    policy = policy_for(EVEN)
    policy.after_failure(0, 5, {0, 1})
    assert policy.used == [2, 3]
    assert policy.choose({0}) == [1, 2], "no more than before"
    assert policy.after_probe(set()) == "device 0 is usable again, device 1 is usable again"
    assert policy.used == [0, 1, 2, 3]


def test_each_loss_doubles_the_pause() -> None:
    policy = policy_for(EVERY)
    first = policy.pause
    policy.after_failure(None, 5, set())
    assert policy.pause == first
    policy.after_failure(None, 5, {0})
    policy.after_probe(set())
    policy.after_failure(None, 9, {0})
    assert policy.pause == 4 * first


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["strategy=ddp"], [1, 2, 3, 4]),
        (["strategy=auto"], [1, 2, 3, 4]),
        (["strategy=fsdp"], [1, 2, 3, 4]),
        (["strategy=hsdp"], [2, 4]),
        (["strategy=pipeline", "strategy.stages=4"], [4]),
        (["strategy=hybrid"], [2, 4]),
    ],
)
def test_sizes_are_those_that_the_strategy_accepts(words: list[str], sizes: list[int], folder: Path) -> None:
    cfg = compose(folder, *words, "trainer.devices=4")
    policy = DevicePolicy([0, 1, 2, 3], cfg)
    assert [size for size in range(1, 5) if policy.accepts(size)] == sizes


def test_a_command_probes_devices(folder: Path) -> None:
    cfg = compose(folder, "launch.elastic=true", "launch.probe='test $DEVICE != 1'")
    assert unusable_devices(cfg, [0, 1, 2]) == {1}
    cfg.launch.probe = None
    assert unusable_devices(cfg, [0, 1, 2]) == set(), "a CPU is always there"
    cfg.trainer.accelerator = "cuda"
    assert unusable_devices(cfg, [0, 99]) == ({99} if torch.cuda.is_available() else {0, 99})


def test_a_probe_quotes_the_interpreter_and_ends_with_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / "an interpreter"
    interpreter.write_text("#!/bin/sh\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    cfg = compose(folder, "launch.elastic=true")
    cfg.trainer.accelerator = "cuda"
    assert unusable_devices(cfg, [0]) == set()
    cfg.launch.probe = "exec sleep 1000"
    assert unusable_devices(cfg, [0], lambda: True) == {0}


@pytest.mark.parametrize(
    ("batch", "world_size", "normalizes", "expected"),
    [(64, 2, True, 4), (64, 2, False, 8), (60, 2, False, 4), (8, 2, False, 4), (8, 1, False, 8)],
    ids=["groups", "no groups", "does not divide", "a rank without a sample", "one rank"],
)
def test_smaller_micro_batches(batch: int, world_size: int, normalizes: bool, expected: int, folder: Path) -> None:
    cfg = compose(folder, f"data.batch_size={batch}", "trainer.accumulate_grad_batches=4", "virtual_ranks=4")
    cfg.runtime.world_size = world_size
    assert with_smaller_micro_batches(cfg, normalizes).trainer.accumulate_grad_batches == expected
    cfg.trainer.accumulate_grad_batches = 2
    assert with_smaller_micro_batches(cfg, normalizes).trainer.accumulate_grad_batches == 4


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("bit_exact=false", "restarting with trainer.accumulate_grad_batches=2; 1 restarts left after this one\n"),
        ("bit_exact=true", "restarting; 1 restarts left after this one\n"),
    ],
)
def test_a_restart_says_what_it_has_changed(
    option: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["strategy=ddp", "trainer.devices=2", "launch.elastic=true", "launch.max_restarts=2", "virtual_ranks=4"]
    cfg = compose(folder, *options, option)
    cfg.runtime.world_size = 2
    folder.mkdir()
    next_start(cfg, DevicePolicy([0, 1], cfg), RankFailedError("rank 0 failed: OutOfMemoryError"))
    assert capsys.readouterr().err.endswith(message)


def test_a_start_leaves_out_unusable_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of the start before, which had three devices, was killed."""
    cfg = compose(
        folder, "strategy=ddp", "trainer.devices=3", "launch.elastic=true", "launch.probe='test $DEVICE != 1'"
    )
    folder.mkdir()
    append_event(folder, "start", 0, world_size=3)
    monkeypatch.setattr(launching, "_run_group", lambda cfg, processes, job: (cfg.runtime.world_size, processes))
    assert launching.launch_workers(cfg) == (2, 2)
    assert read_events(folder)[-1]["reason"] == "device 1 is unusable"


def test_configuration_for_other_devices(folder: Path) -> None:
    cfg = compose(folder, "trainer.devices=4", "strategy=auto")
    fewer = with_devices(cfg, [0, 2, 3])
    assert (fewer.trainer.devices, fewer.strategy.devices, fewer.runtime.world_size) == (3, 3, 3)
    assert cfg.trainer.devices == 4
    cfg.trainer.accelerator = "cuda"
    fewer = with_devices(cfg, [0, 2, 3])
    assert fewer.trainer.devices == fewer.strategy.devices == [0, 2, 3]
