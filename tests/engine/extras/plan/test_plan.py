"""Plans against real runs: the collectives of a step on gloo ranks, and the memory that they allocate."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from engine.dev.dry_gpu.collectives import describe_call
from onecurve.extras.plan.hardware import Hardware
from onecurve.extras.plan.plan import Candidate, begin_run, choose_again, estimate, make_plan
from onecurve.extras.plan.step import Collective
from onecurve.parallel.ddp import DDP
from onecurve.process.consensus import RankConsensus
from onecurve.run.experiment import assemble
from onecurve.targets import build
from tests.support.commands import PARITY, TINY, run, run_here
from tests.support.comparison import check_same_rows, read_rows
from tests.support.plans import planned_collectives
from tests.support.pool import Pool
from tests.support.runs import compose

TASK = ["data=shapes", "data.source.train_size=200", "data.source.test_size=100", "data.batch_size=32"]
TASK += ["hardware=h100", "trainer.max_steps=4", "callbacks=none", "optimizer=adamw"]


class _Collectives(TorchDispatchMode):
    """Counts the collectives of a rank by their description."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found[describe_call(func, args)] += 1
        return func(*args, **(kwargs or {}))


class Watch(L.Callback):
    """Records the third step, which no log point follows: its collectives, its start and its end."""

    def __init__(self) -> None:
        self.mode, self.times = _Collectives(), [0, 0]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        advance = loop.advance

        def watched(fetcher: Any) -> None:
            if loop._batches_that_stepped != 2:
                return advance(fetcher)
            self.times[0] = time.time_ns()
            with self.mode:
                advance(fetcher)
            self.times[1] = time.time_ns()
            return None

        loop.advance = watched


def train(cfg: DictConfig) -> Watch:
    trainer, module, data = assemble(cfg)
    watch = Watch()
    trainer.callbacks.append(watch)
    with patch.object(RankConsensus, "poll", return_value=0):  # ranks agree by the clock, which no plan knows
        trainer.fit(module, datamodule=data, weights_only=True)
    return watch


def collectives_of(cfg: DictConfig) -> Counter[str]:
    return train(cfg).mode.found


def peak_memory(cfg: DictConfig) -> int:
    """Return the most bytes that the allocator has given to a run during its third step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        watch = train(cfg)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    in_use = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        if watch.times[0] <= event.start_ns() <= watch.times[1]:
            peak = max(peak, in_use)
    return peak


def planned(cfg: DictConfig, words: list[str]) -> Candidate:
    hardware: Hardware = build(cfg.hardware)
    profile, job, _ = begin_run(cfg, hardware)
    return estimate(words, cfg, profile, job)


CASES = {
    "ddp": (2, ["strategy=ddp"]),
    "small buckets": (2, ["strategy=ddp", "strategy.bucket_cap_mb=1"]),
    "sharded optimizer": (2, ["strategy=ddp", "strategy.shard_optimizer=true"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "fsdp, weights kept": (2, ["strategy=fsdp", "strategy.reshard_after_forward=false"]),
    "hsdp": (4, ["strategy=hsdp"]),
    "pipeline": (2, ["strategy=pipeline"]),
    "zbv": (2, ["strategy=pipeline", "strategy.schedule=zbv_zero_bubble"]),
    "hybrid": (4, ["strategy=hybrid"]),
    "bits, ddp": (3, ["strategy=ddp", "bit_exact=true", "strategy.shard_optimizer=true"]),
    "bits, fsdp": (2, ["strategy=fsdp", "bit_exact=true"]),
    "bits, hybrid": (4, ["strategy=hybrid", "bit_exact=true", "strategy.schedule=interleaved_1f1b"]),
    "hybrid, fsdp": (4, ["strategy=hybrid", "strategy.data_parallel=fsdp"]),
}
_QUICK = ("small buckets", "hybrid")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _QUICK else pytest.mark.slow) for name in CASES]
)
def test_collectives_are_those_of_a_run(name: str, pool: Pool, folder: Path) -> None:
    ranks, words = CASES[name]
    cfg = compose(folder, *TASK, f"trainer.devices={ranks}", *words)
    words = [word for word in words if word.startswith("strategy")]
    assert planned_collectives(cfg, words, range(ranks)) == pool.run(ranks, collectives_of, cfg)


_SIZED = ("ddp", "sharded optimizer", "fsdp", "pipeline", "bits, ddp", "bits, fsdp", "bits, hybrid")
SIZES = [(name, model) for name in _SIZED for model in ("resnet9", "vit")]


def test_a_profile_is_the_same_each_time(folder: Path) -> None:
    """The memory of a tensor that is freed may be that of another one, at places that differ from time to time."""
    cfg = compose(folder, *TASK)
    profile, _, _ = begin_run(cfg, build(cfg.hardware))
    memory = set()
    for _ in range(4):
        profile.parts.cache_clear()
        parts = profile.parts(16, 2, False)
        memory.add(tuple((part.kept, part.between, part.forward_peak, part.backward_peak) for part in parts))
    assert len(memory) == 1


def test_a_plan_for_a_gpu_takes_float16(folder: Path) -> None:
    own = planned(compose(folder, *TASK, "model=mlp", "hardware=t4", "trainer.precision=16-mixed"), ["strategy=auto"])
    assert own.estimate, own.reason


def test_a_plan_knows_the_short_name_of_double_precision(folder: Path) -> None:
    names = [[*TASK, "trainer.devices=2", "virtual_ranks=1", f"trainer.precision={name}"] for name in ("64", "64-true")]
    short, full = (planned_collectives(compose(folder, *words), ["strategy=ddp"], [0]) for words in names)
    assert short == full


def test_a_broadcast_is_sent_by_all_ranks_but_one() -> None:
    """Shards of an optimizer: an all-reduce of the gradients, and each rank's weights to the others."""
    assert Collective("all_reduce", 400, 4).sent == 600
    assert Collective("broadcast", 400, 4).sent == 300
    assert Collective("send", 400, 2).sent == 400


def test_every_model_that_starts_without_weights_can_be_planned(folder: Path) -> None:
    """The first part of this network flattens images: it has no weights, and no gradient to compute."""
    cfg = compose(folder, *TASK, "trainer.devices=2", "model=mlp")
    own = planned(cfg, ["strategy=pipeline"])
    assert own.estimate, own.reason
    assert own.estimate.memory["weights"] < sum(weight.nbytes for weight in build(cfg.model).parameters())


class MyDDP(DDP):
    plan = "onecurve.extras.plan.strategies.Replicas"


def test_a_strategy_of_ones_own_names_its_plan(folder: Path) -> None:
    cfg = compose(folder, *TASK, "trainer.devices=2", "model=mlp")
    own = planned_collectives(cfg, ["strategy=ddp", f"strategy._target_={__name__}.MyDDP"], range(2))
    assert own == planned_collectives(cfg, ["strategy=ddp"], range(2))


def test_the_best_fits_and_auto_is_kept_unless_another_is_clearly_faster(folder: Path) -> None:
    cfg = compose(folder, *TASK, "trainer.devices=2", "trainer.num_nodes=2", "model.width=4")
    plan = make_plan(cfg, [])
    assert plan.candidates[0].reason == ""
    assert all(candidate.reason for candidate in plan.candidates[1:])
    auto = next(one for one in plan.candidates if one.options == ["strategy=auto"])
    fastest = min(one.estimate.step_ms for one in plan.candidates if one.estimate)
    assert auto.estimate
    assert (plan.candidates[0] is auto) == (0.95 * auto.estimate.step_ms <= fastest)
    cfg.hardware.memory_gib = 1e-3
    assert "needs" in make_plan(cfg, []).candidates[0].reason


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [*SIZES, *(("zbv", model) for model in ("resnet9", "vit"))])
def test_memory_is_that_of_a_run(name: str, model: str, pool: Pool, folder: Path) -> None:
    ranks, words = CASES[name]
    cfg = compose(folder, *TASK, f"trainer.devices={ranks}", f"model={model}", "data.batch_size=64", *words)
    own = planned(cfg, [word for word in words if word.startswith("strategy")])
    assert own.estimate, own.reason
    assert sum(own.estimate.memory.values()) == pytest.approx(max(pool.run(ranks, peak_memory, cfg)), rel=0.1)


@pytest.mark.parametrize("hardware", ["h100", pytest.param("this", marks=pytest.mark.slow)])
def test_best_strategy_trains_as_if_it_had_been_typed(
    hardware: str, small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hardware != "this":  # a new process takes seconds to import torch
        monkeypatch.setattr("onecurve.extras.plan.plan._plan_in_new_process", make_plan)
    task = [*small, *TINY, "trainer.devices=2", "trainer.max_steps=6", "logger=none", "test=false"]
    task.append(f"hardware={hardware}")
    _, err = run_here(*task, "strategy=best", f"run_dir={folder}")
    chosen = OmegaConf.load(folder / "config.yaml")
    assert err.startswith("best: ") or "\nbest: " in err
    assert "strategy=best" not in chosen.runtime.overrides
    assert any(word.startswith("strategy=") for word in chosen.runtime.overrides)
    assert chosen.callbacks.throughput.planned_step_ms == chosen.runtime.planned_step_ms > 0
    assert "throughput/planned_step_ms" in (folder / "metrics.csv").read_text()

    typed = [word for word in chosen.runtime.overrides if word.startswith("strategy")]
    assert compose(folder / "typed", *task, *typed).strategy == chosen.strategy


@pytest.mark.slow
def test_best_strategy_trains_one_curve_on_any_number_of_processes(small: list[str], folder: Path) -> None:
    for devices in (1, 2, 4):
        run(*PARITY, *small, "strategy=best", f"trainer.devices={devices}", f"run_dir={folder}/{devices}")
        assert len([row for row in read_rows(folder / f"{devices}") if row["train/loss"]]) == 20
        check_same_rows(folder / f"{devices}", folder / "1")


def test_an_elastic_run_chooses_again(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """For fewer devices another strategy is the best; if none fits, the smallest is tried; no plan ends it."""
    monkeypatch.setattr("onecurve.extras.plan.plan._plan_in_new_process", make_plan)
    cfg = compose(folder, *TASK, "trainer.devices=4", "strategy=hybrid")
    cfg.trainer.devices, cfg.runtime.world_size = 3, 3
    choose_again(cfg)
    assert cfg.runtime.strategy in ("auto", "ddp", "fsdp")
    build(cfg.strategy)
    planned_ms, cfg.hardware.memory_gib = cfg.runtime.planned_step_ms, 1e-3
    assert planned_ms > 0
    choose_again(cfg)
    assert cfg.runtime.planned_step_ms > 0
    chosen, cfg.module._target_ = cfg.strategy.copy(), "src.no_such_module"
    choose_again(cfg)
    assert cfg.strategy == chosen


def test_the_command_writes_the_plan_and_trains_nothing(small: list[str], folder: Path) -> None:
    out, _ = run_here(
        *small, *TINY, "plan=true", "report=true", "hardware=h100", "trainer.num_nodes=2", f"run_dir={folder}"
    )
    assert "16 ranks, " in out
    assert sorted(path.name for path in folder.iterdir()) == ["plan.html", "plan.json"]
    best, *others = json.loads((folder / "plan.json").read_text())["candidates"]
    assert best["step_ms"] > 0
    assert best["why not"] == ""
    assert all(row["why not"] for row in others)


@pytest.mark.parametrize("word", ["model.depht=3", "trainer.devices=0", "trainer.num_nodes=0"])
def test_an_error_of_a_plan_is_one_line_and_leaves_no_folder(word: str, small: list[str], folder: Path) -> None:
    _, err = run_here(*small, *TINY, "plan=true", "hardware=h100", word, f"run_dir={folder}", code=1)
    assert err.startswith(f"error: {word.partition('=')[0]}")
    assert err.count("\n") == 1
    assert not folder.exists()


def test_best_strategy_is_refused_before_a_plan_is_made(small: list[str], folder: Path) -> None:
    folder.mkdir()
    (folder / "config.yaml").touch()
    _, err = run_here(*small, *TINY, "strategy=best", f"run_dir={folder}", code=1)
    assert err.startswith(f"error: run_dir={folder} holds a run")
