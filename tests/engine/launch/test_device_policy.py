"""The devices and micro-batches that an elastic run chooses: each expected choice was worked out by hand."""

import os
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from onecurve.errors import UserError
from onecurve.launch import restarts
from onecurve.launch.restarts import DevicePolicy, with_devices, with_smaller_micro_batches

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


class Staged:
    """A strategy for a multiple of its stages."""

    def __init__(self, stages: int) -> None:
        self.stages = stages

    def check_world_size(self, size: int) -> None:
        if size % self.stages:
            raise UserError(f"{size} ranks of {self.stages} stages")


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
    assert (policy.used, policy.restarts_left, policy.pause) == ([5, 7], 2, restarts._PAUSE)
    assert float(os.environ.get("ELASTIC_PAUSE", 60)) == restarts._PAUSE, "a minute by default"


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


def test_a_pipeline_without_its_last_device_runs_on_the_first_ones() -> None:
    policy = policy_for(4, {2, 4})
    assert policy.after_failure(3, 5, {3}) == "device 3 is unusable"
    assert (policy.used, policy.restarts_left) == ([0, 1], 2)


def test_a_second_death_of_a_rank_loses_its_device() -> None:
    policy = policy_for()
    assert policy.after_failure(1, 5, set()) == ""
    assert (policy.used, policy.restarts_left, policy.pause) == ([0, 1, 2, 3], 1, restarts._PAUSE)
    assert policy.after_failure(1, 5, set()) == "rank 1 died twice without a new checkpoint (device 1)"
    assert (policy.used, policy.restarts_left, policy.pause) == ([0, 2, 3], 2, 2 * restarts._PAUSE)
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
    assert policy_for().after_failure(None, 5, {1, 2}) == "device 1 is unusable, device 2 is unusable"


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
        ("Staged", {"strategy__stages": 3, "strategy__single_process": True}, [3]),
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
