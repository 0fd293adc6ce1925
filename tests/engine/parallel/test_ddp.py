"""DDP's options: some are exact and others close; all ranks end with the same weights, also after resuming."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.profiler import ProfilerActivity, profile

from onecurve.parallel import ddp
from onecurve.parallel.ddp import DDP
from tests.support.comparison import check_replicas, check_resumed, distances
from tests.support.experiments import SHORT_RUN
from tests.support.interruption import SaveOnce, die
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit

TWO = ["strategy=ddp", "trainer.devices=2"]
POWERSGD = [
    "strategy.comm_hook=powersgd",
    "strategy.comm_start_step=3",
    "strategy.matrix_approximation_rank=1",
    "strategy.bucket_cap_mb=0.02",
]
LOCAL = ["strategy.comm_hook=post_local_sgd", "strategy.comm_start_step=3", "strategy.model_averaging_period=4"]


class CollectiveCounter(L.Callback):
    """Profile the collectives of steps 3 to 5."""

    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU])

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.profiler.start()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            self.profiler.stop()


def count_collectives(cfg: Any) -> Counter[str]:
    watch = CollectiveCounter()
    fit(cfg, watch)
    return Counter(event.name for event in watch.profiler.events() if event.name.startswith("gloo:"))


@pytest.mark.parametrize("synced", [True, False])
def test_broadcasts_buffers_only_where_they_differ(synced: bool, pool: Pool, small: list[str], folder: Path) -> None:
    quiet = [
        "trainer.max_steps=5",
        "trainer.log_every_n_steps=50",
        "trainer.limit_val_batches=0",
        "callbacks.best=null",
    ]
    cfg = compose(folder, *small, *SHORT_RUN, *TWO, *quiet, f"trainer.sync_batchnorm={str(synced).lower()}")
    for found in pool.run(2, count_collectives, cfg):
        assert (found["gloo:broadcast"] > 0) is not synced
        assert found["gloo:all_reduce"] >= 3


def test_is_built_on_the_stream_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients accumulate on the stream on which DDP is built."""
    strategy, built = DDP(bucket_cap_mb=5), mock.Mock()
    monkeypatch.setattr(DDP, "is_bit_exact", False)
    monkeypatch.setattr("onecurve.parallel.ddp.DistributedDataParallel", built)
    monkeypatch.setattr(strategy, "determine_ddp_device_ids", lambda: [1])
    monkeypatch.setattr("torch.cuda.Stream", mock.Mock(side_effect=AssertionError("a side stream")))
    net = nn.Linear(3, 2)
    monkeypatch.setattr(DDP, "lightning_module", net)
    strategy.configure_ddp()
    assert strategy.model is built.return_value
    built.assert_called_once_with(net, device_ids=[1], bucket_cap_mb=5, gradient_as_bucket_view=True)


def halved(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of a user's own, which reduces gradients in half precision."""
    assert state is None
    hook: Any = fp16_compress_hook
    return hook(state, bucket)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("hook", "bound"),
    [
        (["strategy.comm_hook=fp16"], 1e-3),
        (POWERSGD, 1e-2),
        (LOCAL, 1e-2),
        ([f"strategy.comm_hook={__name__}.halved"], 1e-3),
    ],
    ids=["fp16", "powersgd", "local", "own"],
)
def test_lossy_communication_stays_within_tolerance(
    hook: list[str],
    bound: float,
    devices: int,
    alone: Callable[..., Record],
    short_run: Callable[..., list[Record]],
) -> None:
    gentle = ["optimizer.lr=0.001", "model.norm=group"]  # so that differences do not grow
    records = short_run(*gentle, *hook, "strategy=ddp", f"trainer.devices={devices}")
    check_replicas(records)
    losses, _ = distances(records[0], alone(*gentle))
    assert 1e-8 < losses < bound


class ReplicaCheck(L.Callback):
    """Record after each step and at each validation whether all ranks have the same weights."""

    def __init__(self) -> None:
        self.alike: list[bool] = []
        self.validated: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.alike.append(has_same_weights_on_all_ranks(pl_module))

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.validated.append(has_same_weights_on_all_ranks(pl_module))


def has_same_weights_on_all_ranks(module: L.LightningModule) -> bool:
    own = torch.cat([weight.detach().flatten() for weight in module.parameters()])
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return all(torch.equal(rank, own) for rank in ranks)


def fit_with_replica_check(cfg: Any) -> ReplicaCheck:
    watch = ReplicaCheck()
    fit(cfg, watch)
    return watch


def test_local_sgd_averages_periodically_and_before_validation(pool: Pool, small: list[str], folder: Path) -> None:
    quiet = ["callbacks.best=null", "callbacks.checkpoint=null", "data.source.train_size=200", "trainer.max_steps=11"]
    for watch in pool.run(2, fit_with_replica_check, compose(folder, *small, *SHORT_RUN, *TWO, *LOCAL, *quiet)):
        assert watch.alike == [step in (0, 1, 2, 3, 7) for step in range(11)]
        assert watch.validated
        assert all(watch.validated)


def test_local_sgd_resumes_exactly(pool: Pool, small: list[str], folder: Path) -> None:
    """The reference saves at the same step, since post-local SGD averages weights at each save."""
    task = [*SHORT_RUN, *TWO, *LOCAL]
    reference = pool.run(2, fit, compose(folder / "uninterrupted", *small, *task), SaveOnce(6))
    pool.run(2, die, compose(folder, *small, *task), "on_train_batch_end", 6)
    resumed = pool.run(2, fit, compose(folder, *small, *task, f"ckpt_path={folder}/died.ckpt"))
    for rank, record in enumerate(resumed):
        check_resumed([record], reference[rank], done=6)


def test_powersgd_starts_anew_in_a_continued_run(pool: Pool, small: list[str], folder: Path) -> None:
    """It begins again with plain averaging, and then with no error to feed back, on any number of ranks."""
    task = [*SHORT_RUN, *POWERSGD, "strategy=ddp"]
    reference = pool.run(2, fit, compose(folder / "uninterrupted", *small, *task, "trainer.devices=2"))
    pool.run(2, die, compose(folder, *small, *task, "trainer.devices=2"), "on_train_batch_end", 4)
    resumed = compose(folder, *small, *task, "trainer.devices=4", f"ckpt_path={folder}/died.ckpt")
    for record in pool.run(4, fit, resumed):
        assert record.losses == pytest.approx(reference[0].losses[4:], rel=1e-2)


@pytest.mark.parametrize(
    ("devices", "nodes", "expected"), [(1, 1, False), ([3], 1, False), ([0, 1], 1, True), (1, 2, True)]
)
def test_auto_is_ddp_on_several_devices(devices: int | list[int], nodes: int, expected: bool) -> None:
    assert isinstance(ddp.auto(devices, nodes), DDP) is expected
