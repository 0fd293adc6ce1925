"""Any plain LightningDataModule trains the same on any hardware, or is refused in one line."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from src.engine.determinism.ordered_data import OrderedData
from src.engine.utils.errors import UserError
from tests.support.comparison import TOLERANCE, check_resumed, distances
from tests.support.interruption import die
from tests.support.pool import Pool
from tests.support.projects import NoisyPoints, RegressionData
from tests.support.runs import Record, compose, fit_and_test, fit_ranks

FILES = {
    "data/regression": "_target_: tests.support.projects.RegressionData",
    "data/segmentation": "_target_: tests.support.projects.segmentation_data",
    "module/regression": "_target_: tests.support.projects.Regression",
    "module/segmentation": "_target_: tests.support.projects.Segmentation",
}
PROJECTS = {
    "regression": ["data=regression", "module=regression", "~model", "~optimizer", "~scheduler"],
    "segmentation": ["data=segmentation", "module=segmentation", "~model", "~optimizer", "~scheduler"],
    "text": ["experiment=brackets", "data.train_size=90", "data.batch_size=16", "module.width=8"],
}
SHORT = ["trainer.precision=64-true", "trainer.max_epochs=2", "trainer.max_steps=8", "trainer.log_every_n_steps=1"]
SHORT += ["callbacks.best.monitor=val/loss", "callbacks.best.mode=min", "callbacks.checkpoint.every_n_epochs=null"]
PIPELINE = ["strategy=pipeline", "trainer.devices=2"]
HYBRID = ["strategy=hybrid", "trainer.devices=4", "strategy.microbatches=2"]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return overrides of a short run, for which the projects' files are choices."""
    conf = tmp_path_factory.mktemp("conf")
    for name, text in FILES.items():
        file = conf / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return [f"hydra.searchpath=[file://{conf}]", *SHORT]


@pytest.fixture(scope="module")
def references(short: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """Return the record of each project's run on one process."""
    records = {}
    for name, words in PROJECTS.items():
        records[name] = fit_and_test(compose(tmp_path_factory.mktemp(name), *short, *words))
    return records


def check_equal(records: list[Record], reference: Record, with_losses: bool = True) -> None:
    for record in records:
        if not with_losses:  # a plain module logs the loss of its micro-batch
            record.losses = reference.losses
        assert max(distances(record, reference)) < TOLERANCE
        for name, value in reference.metrics.items():
            if name.startswith(("val/", "test/")):
                assert record.metrics[name] == pytest.approx(value, rel=TOLERANCE), name


@pytest.mark.parametrize(
    "place",
    [
        ["strategy=ddp", "trainer.devices=2"],
        ["strategy=fsdp", "trainer.devices=2"],
        PIPELINE,
        ["trainer.accumulate_grad_batches=4"],
        ["+data.num_workers=2"],
        ["+data.num_workers=1", "+data.persistent_workers=true"],
        pytest.param(["strategy=hsdp", "trainer.devices=4"], marks=pytest.mark.slow),
        pytest.param(HYBRID, marks=pytest.mark.slow),
        pytest.param(["strategy=ddp_spawn", "trainer.devices=2"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_random_transforms_and_dropout_are_the_same(
    place: list[str], short: list[str], references: dict[str, Record], pool: Pool, folder: Path
) -> None:
    """Its DataModule divides the batch by the world size, and splits at random; validation has two loaders."""
    records = fit_ranks(compose(folder, *short, *PROJECTS["regression"], *place), pool, test=True)
    assert {"val/loss", "val/other", "test/loss"} <= references["regression"].metrics.keys()
    check_equal(records, references["regression"], with_losses="accumulate" not in place[0])


@pytest.mark.parametrize("project", ["segmentation", "text"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_other_tasks(
    project: str, strategy: str, short: list[str], references: dict[str, Record], pool: Pool, folder: Path
) -> None:
    words = [*PROJECTS[project], f"strategy={strategy}", "trainer.devices=2"]
    check_equal(fit_ranks(compose(folder, *short, *words), pool, test=True), references[project])


def test_resumes_within_an_epoch_elsewhere(
    short: list[str], references: dict[str, Record], pool: Pool, folder: Path
) -> None:
    words = [*short, *PROJECTS["regression"]]
    pool.run(2, die, compose(folder, *words, "strategy=ddp", "trainer.devices=2"), "on_train_batch_end", 7)
    rest = replace(references["regression"], losses=references["regression"].losses[7:])
    for record in fit_ranks(compose(folder, *words, *PIPELINE, f"ckpt_path={folder}/died.ckpt"), pool):
        assert max(distances(record, rest)) < TOLERANCE
    alone = fit_ranks(compose(folder, *words, "+data.num_workers=1", f"ckpt_path={folder}/died.ckpt"), pool)
    check_resumed(alone, references["regression"], 7)


def test_weighted_sampler_is_the_same(short: list[str], pool: Pool, folder: Path) -> None:
    words = [*short, *PROJECTS["regression"], "+data.weighted=true"]
    alone = fit_and_test(compose(folder / "alone", *words))
    assert len({sample for batch in alone.indices[:5] for sample in batch}) < 60, "samples are drawn with replacement"
    check_equal(fit_ranks(compose(folder, *words, "strategy=ddp", "trainer.devices=2"), pool, test=True), alone)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(64)


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class OwnGenerator(NoisyPoints):
    """Draws from a generator that nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def __getitem__(self, index: int) -> Any:
        return self.points[index] + torch.randn(6, generator=self.generator), torch.zeros(2)


def collate_with_noise(samples: list[Any]) -> Any:
    inputs, targets = torch.utils.data.default_collate(samples)
    return inputs + torch.randn_like(inputs), targets


def set_up(made: Any, folder: Path) -> OrderedData:
    """Set a DataModule up that returns `made` for training."""
    plain = RegressionData()
    plain.train_dataloader = lambda: made  # type: ignore[method-assign]
    data = OrderedData(plain, seed=0, limits={"train": None, "val": None, "test": None})
    data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=folder)
    data.setup("fit")
    return data


POINTS: Dataset[Any] = NoisyPoints()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (DataLoader(Stream(), 16), "Stream is an IterableDataset"),
        (DataLoader(POINTS, batch_sampler=[[0, 1], [2, 3]]), "has a batch_sampler of its own"),
        (DataLoader(POINTS, batch_size=None), "or batch_size=None: give batch_size, the samples of an optimizer step"),
        (DataLoader(POINTS, 16, sampler=DistributedSampler(POINTS, 2, 0)), "has a DistributedSampler: leave it out"),
        (OwnIteration(POINTS, 16), "OwnIteration has an __iter__ of its own: return a torch DataLoader"),
        ([DataLoader(POINTS, 16), DataLoader(POINTS, 16)], "returns 2 loaders: return one"),
        ([torch.zeros(2)], "returns Tensor: return a torch DataLoader"),
        (DataLoader(POINTS, 111), "data.batch_size=111 exceeds the 110 samples to train on"),
    ],
)
def test_refuses_what_has_an_order_of_its_own(made: Any, message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        set_up(made, folder)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(OwnGenerator(), 16), "OwnGenerator has a random generator or a state of its own"),
        (DataLoader(POINTS, 16, collate_fn=collate_with_noise), "collate_fn draws random numbers"),
        (DataLoader(POINTS, 16), None),
    ],
)
def test_warns_of_random_numbers_that_it_cannot_repeat(
    loader: Any, message: str | None, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "src")
    set_up(loader, folder)
    found = [text for name, _, text in caplog.record_tuples if name.startswith("src.")]
    assert [message in text for text in found] == [True] if message else not found


def test_shows_the_error_of_a_property(folder: Path) -> None:
    """Forwarding to the user's DataModule hides neither its errors nor the engine's own."""
    data = set_up(DataLoader(POINTS, 16), folder)
    assert data.batch_size_per_device == 16
    with pytest.raises(AttributeError, match="'RegressionData' object has no attribute 'absent'"):
        _ = data.absent
    data.trainer = None
    with pytest.raises(AttributeError, match="accumulate_grad_batches"):
        _ = data.accumulate
