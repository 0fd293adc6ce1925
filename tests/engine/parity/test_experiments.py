"""Experiments that some places could change: dropout, recomputed blocks, clipping, schedules of torch.

test_parity.py has every strategy, with the experiments that all of them train.
"""

from collections.abc import Callable

import pytest

from tests.support.comparison import TOLERANCE, check_replicas, distances
from tests.support.experiments import SMALL_MLP, TORCH_SCHEDULES, VIT
from tests.support.runs import Record

RMSPROP = ["optimizer._target_=torch.optim.RMSprop"]
WIDE_RESNET = ["model=wide_resnet", "model.width=1", "model.depth=10", "model.dropout=0.2"]
EXPERIMENTS = {
    "default": [],
    "clipped": ["trainer.gradient_clip_val=0.5"],
    "vit without dropout": [*VIT, "model.dropout=0", "model.drop_path=0"],
    "vit": [*VIT, "model.dropout=0.2", "model.drop_path=0.3"],
    "wide_resnet": WIDE_RESNET,
    "one group": [*WIDE_RESNET, "virtual_ranks=1"],
    "groups of each process": [*WIDE_RESNET, "trainer.sync_batchnorm=false"],
    "own forward": ["model._target_=tests.support.zoo.LoopedList", "~model.width", "~model.norm"],
    "unused parameters": ["model._target_=tests.support.zoo.Unused", "~model.width", "~model.norm"],
    **{name: [*SMALL_MLP, *RMSPROP, *schedule] for name, schedule in TORCH_SCHEDULES.items()},
}
DDP, FSDP = "strategy=ddp trainer.devices=2", "strategy=fsdp trainer.devices=2"
PIPELINE = "strategy=pipeline trainer.devices=2"
HYBRID = "strategy=hybrid trainer.devices=4"
BLOCKS = "module.recompute=blocks"
ROWS = [
    ("vit", f"{BLOCKS} trainer.accumulate_grad_batches=4"),
    ("own forward", f"{BLOCKS} {FSDP}"),
    ("unused parameters", f"{DDP} +strategy.find_unused_parameters=true"),
]
SLOW_ROWS = [
    ("clipped", FSDP),  # tests/engine/bits clips under FSDP and in stages
    ("clipped", f"{PIPELINE} strategy.microbatches=1 strategy.schedule=gpipe"),
    ("clipped", HYBRID),
    ("clipped", f"{HYBRID} strategy.data_parallel=fsdp"),
    ("vit", f"{PIPELINE} strategy.schedule=zbv_zero_bubble"),  # tests/engine/bits has it in a pipeline
    ("vit", f"{HYBRID} strategy.data_parallel=fsdp"),
    ("vit", f"{BLOCKS} {PIPELINE}"),
    ("vit", f"{BLOCKS} {FSDP}"),
    ("vit", f"{BLOCKS} strategy=ddp_spawn trainer.devices=2"),
    ("wide_resnet", f"{BLOCKS} {PIPELINE} strategy.schedule=interleaved_1f1b"),
    ("wide_resnet", f"{BLOCKS} {PIPELINE} strategy.schedule=gpipe"),
    ("wide_resnet", f"{BLOCKS} {FSDP}"),
    ("wide_resnet", f"{BLOCKS} {HYBRID} strategy.data_parallel=fsdp"),
    ("one group", f"{BLOCKS} {DDP}"),
    ("one group", f"{BLOCKS} strategy=hsdp trainer.devices=4"),
    ("groups of each process", BLOCKS),
    # tests/engine/optim/test_torch_schedulers.py has each on one process.
    *[(name, f"{FSDP} trainer.accumulate_grad_batches=2") for name in TORCH_SCHEDULES],
]


@pytest.mark.parametrize(
    ("experiment", "place"), [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW_ROWS)]
)
def test_agrees_with_single_process(
    experiment: str, place: str, alone: Callable[..., Record], short_run: Callable[..., list[Record]]
) -> None:
    reference = alone(*EXPERIMENTS[experiment])
    records = short_run(*EXPERIMENTS[experiment], *place.split())
    assert {name for record in records for name in record.final} == set(reference.final)
    for record in records:
        assert max(distances(record, reference)) < TOLERANCE
    check_replicas(records)


@pytest.mark.slow
def test_each_experiment_has_a_curve_of_its_own(alone: Callable[..., Record]) -> None:
    names = [name for name in EXPERIMENTS if name != "plateau"]  # which falls after the first epoch, as "epoch" does
    assert len({tuple(alone(*EXPERIMENTS[name]).losses) for name in names}) == len(names)
