"""The pipeline: schedules agree with one process and follow their order, splits are balanced."""

import gc
import itertools
import json
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.data import DataLoader

import onecurve
from onecurve.errors import UserError
from onecurve.extras.report.simulation import Action, order_of_passes
from onecurve.parallel.pipeline.blocks import Block, ordered_blocks
from onecurve.parallel.pipeline.pipeline import Pipeline
from onecurve.parallel.pipeline.rehearsal import input_of_network
from onecurve.parallel.pipeline.schedules import SCHEDULES
from onecurve.parallel.pipeline.split import cut
from onecurve.parallel.pipeline.stage import micro_batch
from onecurve.run.experiment import assemble
from tests.support.experiments import SHORT_RUN
from tests.support.pool import Pool, RankFailed
from tests.support.runs import Record, compose, fit

PIPELINE = ["strategy=pipeline", "trainer.devices=2"]


def test_trains_in_half_precision(alone: Callable[..., Record], short_run: Callable[..., list[Record]]) -> None:
    half = "trainer.precision=bf16-mixed"
    for record in short_run(*PIPELINE, half):
        assert record.losses == pytest.approx(alone(half).losses, rel=0.05)


PASSES = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


def trace(cfg: Any) -> tuple[list[Action], list[Action]]:
    """Return the passes of a run in the order of execution, and those of a step in that of the simulation."""
    done: list[Action] = []
    with pytest.MonkeyPatch.context() as patch:
        for method, kind in PASSES.items():
            patch.setattr(PipelineStage, method, _recording(getattr(PipelineStage, method), kind, done))
        trainer, module, data = assemble(cfg)
        trainer.fit(module, datamodule=data)
    strategy: Any = trainer.strategy
    return done, order_of_passes(strategy.schedule, 2, NUM_MICROBATCHES)[strategy._pipeline_rank]


def _recording(method: Any, kind: str, done: list[Action]) -> Any:
    def recorded(self: PipelineStage, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        split = kwargs.get("full_backward") is False
        done.append(Action(self.stage_index, micro_batch, "I" if split else kind))
        return method(self, micro_batch, *args, **kwargs)

    return recorded


def max_live_microbatches(actions: list[Action]) -> int:
    """Return the maximum number of micro-batches whose activations a rank's stages hold at once."""
    counts = itertools.accumulate({"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] for action in actions)
    return max(counts)


NUM_MICROBATCHES = 8
BOUNDS: dict[str, Callable[[int], int]] = {  # for two ranks, by rank, from the schedules' papers
    "gpipe": lambda rank: NUM_MICROBATCHES,
    "1f1b": lambda rank: 2 - rank,
    "interleaved_1f1b": lambda rank: 2 * (1 - rank) + 2 + 1,
    "interleaved_zero_bubble": lambda rank: 2 * 2,
    "zbv_zero_bubble": lambda rank: 2 * 2,
}


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=[] if name in ("1f1b", "zbv_zero_bubble") else pytest.mark.slow) for name in SCHEDULES],
)
def test_passes_follow_the_schedule(schedule: str, pool: Pool, small: list[str], folder: Path) -> None:
    """GPipe holds the activations of all micro-batches at once, the other schedules fewer."""
    two_steps = ["trainer.max_steps=2", "trainer.limit_val_batches=0", "callbacks.best=null"]
    chosen = [f"strategy.schedule={schedule}", f"strategy.microbatches={NUM_MICROBATCHES}", "virtual_ranks=8"]
    cfg = compose(folder, *small, *SHORT_RUN, *PIPELINE, *two_steps, *chosen)
    for rank, (done, simulated) in enumerate(pool.run(2, trace, cfg)):
        assert done == 2 * simulated
        assert max_live_microbatches(simulated) <= BOUNDS[schedule](rank)
        check_timeline(folder / "timeline" / f"rank{rank}.jsonl", simulated)


def check_timeline(file: Path, simulated: list[Action]) -> None:
    """Check that the timeline has the passes of step 2 in the order of the simulation, one after the other."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    (line,) = [line for line in lines if line["kind"] == "passes"]
    (interval,) = [line for line in lines if line["kind"] == "interval" and line["step"] == 2 and line["steps"]]
    assert line["step"] == 2
    assert [Action(*each[:3]) for each in line["passes"]] == simulated
    times = [time for *_, start, end in line["passes"] for time in (start, end)]
    assert times == sorted(times)
    assert interval["start"] <= line["start"] + times[0] + 1e-3
    assert line["start"] + times[-1] <= interval["start"] + interval["seconds"]


def blocks(costs: list[int]) -> list[Block]:
    return [
        Block(f"b{k}", [], {f"b{k}": nn.Parameter(torch.zeros(1))}, cost, [], can_end_stage=True)
        for k, cost in enumerate(costs)
    ]


@pytest.mark.parametrize(
    ("costs", "stages", "sizes"),
    [([1, 1, 1, 1], 2, [2, 2]), ([10, 1, 1, 1], 2, [1, 3]), ([1, 1, 1, 9, 1], 3, [3, 1, 1]), ([1] * 200, 8, [25] * 8)],
)
def test_split_minimizes_the_largest_stage(costs: list[int], stages: int, sizes: list[int]) -> None:
    assert [len(stage) for stage in cut(blocks(costs), stages, "auto")] == sizes


def test_the_name_of_one_block_is_a_cut() -> None:
    four = blocks([1, 1, 1, 1])
    assert [len(stage) for stage in cut(four, 2, four[1].name)] == [1, 3]
    with pytest.raises(UserError, match=r"strategy\.split: no cut can be before middle; known: "):
        cut(four, 2, "middle")


def test_no_stage_is_without_parameters() -> None:
    """Flattening costs nothing but sends a full image on, so the even split would give it a stage."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 16), nn.Linear(16, 10))
    stages = cut(ordered_blocks(net, torch.rand(2, 3, 32, 32)), 2, "auto")
    assert [len(stage) for stage in stages] == [2, 1]


def test_prints_the_split(small: list[str], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "onecurve"):
        fit(compose(folder, *small, *SHORT_RUN, "strategy=pipeline", "trainer.devices=1", "trainer.max_steps=1"))
    assert "1f1b, 4 micro-batches, bubble of at least 0.0%" in caplog.text
    assert "stem ... head" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "factor", "is_refused"),
    [
        (torch.float64, 1 + 1e-13, False),
        (torch.float64, 1.015, True),
        (torch.float64, 1 + 1e-9, True),
        (torch.float32, 1 + 1e-6, False),
        (torch.float32, 1.001, True),
        (torch.bfloat16, 1.01, False),
        (torch.bfloat16, 1.1, True),
    ],
)
def test_the_returned_loss_is_the_trained_one(dtype: torch.dtype, factor: float, is_refused: bool) -> None:
    """Up to rounding in its type: with a factor, another curve would have the same fingerprint."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    losses = [torch.tensor(0.5, dtype=dtype), torch.tensor(0.75, dtype=dtype)]
    progress = SimpleNamespace(total=SimpleNamespace(processed=0))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    module = SimpleNamespace(trainer=SimpleNamespace(fit_loop=loop))
    stand_in: Any = SimpleNamespace(lightning_module=module, _losses=losses, _group=None, _stage_to_rank=[0])
    with pytest.raises(UserError, match="trains the mean of") if is_refused else nullcontext():
        Pipeline.compare_loss(stand_in, torch.tensor(1.25 * factor, dtype=dtype))


@dataclass
class _Pair:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"nodes": torch.ones(7, 1)}, r"has tensors of the shapes \[\[7, 1\]\]"),
        ((torch.ones(4), torch.ones(())), r"has tensors of the shapes \[\[4\], \[\]\]"),
        (_Pair(torch.ones(4)), "is a dataclass"),
        ({"points": [1.0, 2.0, 3.0, 4.0]}, r"has tensors of the shapes \[\]"),
    ],
)
def test_a_batch_that_has_no_row_per_sample_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"divides a batch into 4 micro-batches .* of this loader {message}"):
        micro_batch(batch, 0, 4)


def test_lists_that_have_an_item_for_each_sample_are_divided() -> None:
    batch = {"x": torch.arange(4), "y": [0.0, 1.0, 2.0, 3.0], "names": ("a", "b", "c", "d"), "classes": [5, 6]}
    part = micro_batch(batch, 1, 2)
    assert part.pop("x").tolist() == [1, 3]
    assert part == {"y": [1.0, 3.0], "names": ("b", "d"), "classes": [5, 6]}


class _Points(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        del self.layer
        self.net = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, outputs: Any, batch: Any = None) -> Any:
        return super().loss(outputs)


def _fit_batches_of_two_sizes(folder: Path, bit_exact: bool) -> None:
    batches = [list(range(8)), list(range(8, 12)), list(range(12, 20)), list(range(20, 24))]
    trainer = onecurve.Trainer(
        strategy="pipeline", accelerator="cpu", devices=2, bit_exact=bit_exact, max_epochs=1, default_root_dir=folder
    )
    trainer.fit(_Points(), DataLoader(RandomDataset(32, 24), batch_sampler=batches))


@pytest.mark.parametrize("bit_exact", [False, True])
def test_batches_of_several_sizes_are_refused(bit_exact: bool, pool: Pool, folder: Path) -> None:
    message = r"the network was cut for micro-batches of shape \[\d, 32\], and gets \[\d, 32\]: .* batches of one size"
    with pytest.raises(RankFailed, match=message):
        pool.run(2, _fit_batches_of_two_sizes, folder, bit_exact)


def _fit_dropped_inputs(folder: Path) -> None:
    module = _Points()
    module.net = nn.Sequential(nn.Dropout(0.5, inplace=True), *module.net)
    trainer = onecurve.Trainer(
        strategy="pipeline", accelerator="cpu", devices=2, max_epochs=1, logger=False, default_root_dir=folder
    )
    trainer.fit(module, DataLoader(RandomDataset(32, 16), batch_size=8))


def test_a_layer_may_change_the_input_of_the_network_in_place(pool: Pool, folder: Path) -> None:
    """The micro-batches are views of one tensor, whose changes autograd counts together."""
    pool.run(2, _fit_dropped_inputs, folder)


def _weights_left(folder: Path) -> int:
    """Return how many weights of the full network are still in memory after training."""
    module = _Points()
    weights = [weakref.ref(weight) for weight in module.parameters()]
    trainer = onecurve.Trainer(
        strategy="pipeline", accelerator="cpu", devices=2, max_epochs=1, logger=False, default_root_dir=folder
    )
    trainer.fit(module, DataLoader(RandomDataset(32, 16), batch_size=8))
    gc.collect()
    return sum(weight() is not None for weight in weights)


def test_a_rank_holds_the_weights_of_its_stage_only(pool: Pool, folder: Path) -> None:
    """Each of two layers has a weight and a bias."""
    assert pool.run(2, _weights_left, folder) == [2, 2]


def test_an_attribute_that_a_hook_of_training_sets_is_named() -> None:
    class Scaled(L.LightningModule):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch * self.scale).sum()

    with pytest.raises(UserError, match=r"Scaled.training_step before the hooks .* no attribute 'scale': give the"):
        input_of_network(Scaled(), torch.ones(4, 2))
