"""Recomputation of activations changes memory, and neither the curve nor what ranks send."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from src.data.batch import Batch
from src.models.dropout import set_keys, use_sample_dropout
from src.models.flops import flops_per_sample
from src.models.vit import vit
from src.run.experiment import assemble
from src.strategies.batch_norm import GroupedBatchNorm
from src.utils import recomputation
from src.utils.errors import UserError
from src.utils.recomputation import recompute_blocks
from tests.support.comparison import TOLERANCE, check_replicas, distances
from tests.support.experiments import SHORT
from tests.support.networks import Skips
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit, fit_ranks

BLOCKS = "module.recompute=blocks"
MODELS = {
    "vit": ["model=vit", "model.width=8", "model.depth=4", "model.heads=2", "model.patch=8"]
    + ["model.dropout=0.2", "model.drop_path=0.3"],
    "wide_resnet": ["model=wide_resnet", "model.width=1", "model.depth=10", "model.dropout=0.2"],
    "one group": ["model=wide_resnet", "model.width=1", "model.depth=10", "model.dropout=0.2", "data.norm_groups=1"],
    "each process": ["model=wide_resnet", "model.width=1", "model.depth=10", "trainer.sync_batchnorm=false"],
}
PIPELINE = ["strategy=pipeline", "trainer.devices=2"]
ROWS = [
    ("vit", []),
    ("vit", ["trainer.accumulate_grad_batches=4"]),
    ("vit", ["strategy=fsdp", "trainer.devices=2"]),
    ("vit", PIPELINE),
    ("wide_resnet", ["trainer.accumulate_grad_batches=2"]),
    ("wide_resnet", [*PIPELINE, "strategy.schedule=gpipe"]),
    ("wide_resnet", [*PIPELINE, "strategy.schedule=interleaved_1f1b"]),
    ("wide_resnet", ["strategy=fsdp", "trainer.devices=2"]),
    ("one group", ["strategy=ddp", "trainer.devices=2"]),
    ("each process", []),
]
ON_FOUR = [
    ("wide_resnet", ["strategy=hybrid", "strategy.data_parallel=fsdp", "trainer.devices=4"]),
    ("one group", ["strategy=hsdp", "trainer.devices=4"]),
    ("vit", ["strategy=ddp_spawn", "trainer.devices=2"]),
]


@pytest.fixture(scope="module")
def reference(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Record]:
    """Return a function that trains a model in one process without recomputation."""
    found: dict[str, Record] = {}

    def run(model: str) -> Record:
        if model not in found:
            folder = tmp_path_factory.mktemp("reference")
            found[model] = fit(compose(folder, *small, "experiment=parity", *SHORT, *MODELS[model]))
        return found[model]

    return run


@pytest.mark.parametrize(
    ("model", "options"), [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in ON_FOUR)], ids=str
)
def test_same_run(
    model: str,
    options: list[str],
    reference: Callable[[str], Record],
    pool: Pool,
    small: list[str],
    folder: Path,
) -> None:
    cfg = compose(folder, *small, "experiment=parity", *SHORT, *MODELS[model], *options, BLOCKS)
    records = fit_ranks(cfg, pool)
    assert {name for record in records for name in record.final} == set(reference(model).final)
    for record in records:
        assert max(distances(record, reference(model))) < TOLERANCE
    check_replicas(records)
