"""Any plain LightningDataModule trains the same on any hardware, or is refused in one line."""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from traceback import format_exception
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from onecurve.data.layout import Division
from onecurve.data.ordered_data import OrderedData
from onecurve.data.orders import order_of
from onecurve.data.rank_batches import TrainingBatches
from onecurve.data.rank_loader import RankLoader
from onecurve.errors import UserError
from onecurve.identity.fingerprint import _bytes_of
from onecurve.run.experiment import run_experiment
from tests.support.comparison import TOLERANCE, check_resumed, distances
from tests.support.interruption import die
from tests.support.pool import Pool
from tests.support.projects import NoisyPoints, Regression, RegressionData
from tests.support.runs import Record, compose, fit, fit_and_test, fit_ranks

CPU = torch.device("cpu")
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
OTHER_PLACES = [
    ["strategy=fsdp", "trainer.devices=2"],
    ["strategy=hsdp", "trainer.devices=4"],
    ["strategy=hybrid", "trainer.devices=4", "strategy.microbatches=2"],
    ["strategy=ddp_spawn", "trainer.devices=2"],
    ["+data.num_workers=2"],
]


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


def check_equal(records: list[Record], reference: Record) -> None:
    for record in records:
        assert max(distances(record, reference)) < TOLERANCE
        for name, value in reference.metrics.items():
            if name.startswith(("val/", "test/")):
                assert record.metrics[name] == pytest.approx(value, rel=TOLERANCE), name


@pytest.mark.parametrize(
    "place",
    [
        ["strategy=ddp", "trainer.devices=2"],
        PIPELINE,
        ["trainer.accumulate_grad_batches=4"],
        ["+data.num_workers=1", "+data.persistent_workers=true"],
        *(pytest.param(place, marks=pytest.mark.slow) for place in OTHER_PLACES),
    ],
    ids=" ".join,
)
def test_random_transforms_and_dropout_are_the_same(
    place: list[str], short: list[str], references: dict[str, Record], pool: Pool, folder: Path
) -> None:
    """Its DataModule divides the batch by the world size, and splits at random; validation has two loaders."""
    records = fit_ranks(compose(folder, *short, *PROJECTS["regression"], *place), pool, test=True)
    assert {"val/loss", "val/other", "test/loss"} <= references["regression"].metrics.keys()
    check_equal(records, references["regression"])


@pytest.mark.parametrize(
    ("strategy", "project"),
    [
        *[("fsdp", "segmentation"), ("pipeline", "text")],
        *[
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (("ddp", "text"), ("ddp", "segmentation"), ("fsdp", "text"), ("pipeline", "segmentation"))
        ],
    ],
)
def test_other_tasks(
    strategy: str, project: str, short: list[str], references: dict[str, Record], pool: Pool, folder: Path
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
        (DataLoader(POINTS, 16, sampler=DistributedSampler(POINTS, 2, 0)), "has a DistributedSampler: leave it out"),
        (OwnIteration(POINTS, 16), "OwnIteration has an __iter__ of its own: return a torch DataLoader"),
        (DataLoader(POINTS, None, sampler=BatchSampler(range(110), 16, False)), "give it as batch_sampler if these"),
        (DataLoader(POINTS, None, sampler=[[0, 1], [2, 3]]), "list yields .*: give it as batch_sampler if these"),
        ([torch.zeros(2)], "returns Tensor: return a torch DataLoader"),
        (DataLoader(POINTS, 111), "data.batch_size=111 exceeds the 110 samples to train on"),
    ],
)
def test_refuses_what_has_an_order_of_its_own(made: Any, message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        set_up(made, folder)


class OwnBatches(DataLoader[Any]):
    """Changes its batches as loaders of graphs do, where torch has no public method for it."""

    def _get_iterator(self) -> Any:
        return map(torch.neg, super()._get_iterator())


def test_warns_of_a_loader_whose_method_is_not_called(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "onecurve")
    for _ in range(2):
        set_up(OwnBatches(POINTS, 10), folder)
    assert caplog.text.count("OwnBatches") == 1
    assert "_get_iterator of OwnBatches is not called: batches are made of its dataset, sampler and" in caplog.text
    caplog.clear()
    set_up(DataLoader(POINTS, 10), folder)
    assert "is not called" not in caplog.text


@pytest.mark.parametrize(("dataset", "warns"), [(OwnGenerator(), True), (POINTS, False)])
def test_warns_of_a_generator_that_it_cannot_seed(
    dataset: Any, warns: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "onecurve")
    set_up(DataLoader(dataset, 10), folder)
    found = [text for name, _, text in caplog.record_tuples if name.startswith("onecurve.")]
    assert ["OwnGenerator has a random generator or a state of its own" in text for text in found] == [True] * warns


def test_shows_the_error_of_a_property(folder: Path) -> None:
    """Forwarding to the user's DataModule hides neither its errors nor the engine's own."""
    data = set_up(DataLoader(POINTS, 16), folder)
    assert data.batch_size_per_device == 16
    with pytest.raises(AttributeError, match="'RegressionData' object has no attribute 'absent'"):
        _ = data.absent
    data.trainer = None
    with pytest.raises(AttributeError, match="max_epochs"):
        _ = data.total_steps


class OwnOrder(Sampler[int]):
    """Shuffles with a generator that nobody seeds."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 110

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(110).tolist())


class Curriculum(Sampler[int]):
    """Begins each epoch with another sample."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + 64))


def test_order_of_samplers(folder: Path) -> None:
    with pytest.raises(UserError, match="OwnOrder has a random generator of its own"):
        set_up(DataLoader(POINTS, 16, sampler=OwnOrder()), folder)

    def order(sampler: Any, epoch: int) -> Any:
        return order_of(DataLoader(POINTS, 16, sampler=sampler), 0, epoch)

    assert order(Curriculum(), 3).tolist() == list(range(3, 67))
    longer = RandomSampler(POINTS, num_samples=250)  # type: ignore[arg-type]
    assert set(torch.bincount(order(longer, 0)).tolist()) == {2, 3}
    weighted = WeightedRandomSampler([1.0] + 109 * [0.0], 32)
    batches = TrainingBatches(lambda epoch: order(weighted, epoch).split(16), Division(), 2)
    assert set(torch.cat([*batches]).tolist()) == {0}
    fetched = RankLoader(DataLoader(POINTS, 16), batches, 0, CPU)
    assert len({tuple(point.tolist()) for (part,) in fetched for point in part.batch[0]}) == 32, "one sample, 32 noises"


class Shared(NoisyPoints):
    """Opens its file in the process that fetches the first sample."""

    opened_in: int | None = None

    def __getitem__(self, index: int) -> Any:
        self.opened_in = self.opened_in or os.getpid()
        assert self.opened_in == os.getpid(), "a worker has the file of another process"
        return super().__getitem__(index)


def open_file(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.opened_in = os.getpid()


@pytest.mark.parametrize("function", [None, open_file])
def test_workers_open_their_own_files(function: Any, folder: Path) -> None:
    data = set_up(DataLoader(Shared(), 16, num_workers=2, worker_init_fn=function), folder)
    assert data.example_batch(2)[0].batch[0].shape == (2, 6)
    data.trainer.strategy._lightning_module = Regression()
    assert len(list(data.train_dataloader())) == 6


class CountsSteps(Regression):
    """Asks for the number of steps before the checkpoint is restored, as examples of Hugging Face do."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.steps = self.trainer.estimated_stepping_batches


def test_a_module_that_counts_its_steps_resumes_exactly(
    short: list[str], references: dict[str, Record], folder: Path
) -> None:
    words = [*short, *PROJECTS["regression"], f"module._target_={__name__}.CountsSteps"]
    die(compose(folder, *words), "on_train_batch_end", 7)
    check_resumed([fit(compose(folder, *words, f"ckpt_path={folder}/died.ckpt"))], references["regression"], 7)


class NoTest(RegressionData):
    test_dataloader = L.LightningDataModule.test_dataloader


class AugmentsOnDevice(RegressionData):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + torch.randn_like(batch[0]), batch[1]


def collate_with_noise(samples: list[Any]) -> Any:
    inputs, targets = torch.utils.data.default_collate(samples)
    return inputs + torch.randn_like(inputs), targets


class AugmentsInCollate(RegressionData):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size_per_device, collate_fn=collate_with_noise, **self.options)


def test_a_stage_without_a_loader_is_refused(short: list[str], folder: Path) -> None:
    words = [*short, *PROJECTS["regression"], f"data._target_={__name__}.NoTest", "test=true"]
    with pytest.raises(UserError, match=r"NoTest has no test_dataloader: add it, or leave this stage out"):
        run_experiment(compose(folder, *words, "fit=false"))
    with pytest.raises(UserError, match=r"test=true: NoTest has no test_dataloader: add it, or set test=false"):
        run_experiment(compose(folder, *words))


@pytest.mark.parametrize(
    ("name", "function", "workers"),
    [
        ("AugmentsOnDevice", "on_after_batch_transfer", 0),
        ("AugmentsInCollate", "collate_fn", 0),
        ("AugmentsInCollate", "collate_fn", 1),
        pytest.param("AugmentsOnDevice", "on_after_batch_transfer", 1, marks=pytest.mark.slow),  # no worker calls it
    ],
)
def test_refuses_random_numbers_for_a_part_of_the_batch(
    name: str, function: str, workers: int, short: list[str], folder: Path
) -> None:
    words = [*short, *PROJECTS["regression"], f"data._target_={__name__}.{name}", f"+data.num_workers={workers}"]
    assert fit(compose(folder / "alone", *words)).losses
    with pytest.raises(UserError, match=f"^{function} draws random numbers for the samples of one process"):
        fit(compose(folder, *words, "trainer.accumulate_grad_batches=4"))


class Unreadable(RegressionData):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.train.dataset.points = list(self.train.dataset.points)
        self.train.dataset.points[self.train.indices[60]] = None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an exception has no notes")
@pytest.mark.parametrize("workers", [0, 1])
def test_names_the_sample_that_cannot_be_read(workers: int, short: list[str], folder: Path) -> None:
    words = [*short, *PROJECTS["regression"], f"data._target_={__name__}.Unreadable", f"+data.num_workers={workers}"]
    with pytest.raises(TypeError) as raised:
        fit(compose(folder, *words))
    assert re.search(r"This is sample \d+ of NoisyPoints\.", "".join(format_exception(raised.value)))


class Penalized(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.global_step  # nothing in the first step


class Temperature(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(()))


class TwoInputs(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0], batch[1]), batch)


class Newton(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class ClipsItself(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("Newton", "LBFGS multiplies the gradients of all weights"),
        ("Penalized", r"mean of Penalized.loss\(outputs, batch\), .* but training_step returns .* class weights"),
        ("Temperature", "trains the parameters of `net`, and temperature is not one of them"),
        ("TwoInputs", "TwoInputs.training_step must call its `net` with one tensor"),
    ],
)
def test_pipelines_refuse_what_they_would_train_otherwise(
    module: str, message: str, short: list[str], folder: Path
) -> None:
    alone = ["strategy=pipeline", "trainer.devices=1", "strategy.microbatches=2"]
    with pytest.raises(UserError, match=message):
        fit(compose(folder, *short, *PROJECTS["regression"], *alone, f"module._target_={__name__}.{module}"))


def test_a_pipeline_names_a_hook_that_sees_a_part_of_the_gradients(
    short: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = ["strategy=pipeline", "trainer.devices=1", "strategy.microbatches=2"]
    fit(compose(folder, *short, *PROJECTS["regression"], *alone, f"module._target_={__name__}.ClipsItself"))
    assert "ClipsItself.on_before_optimizer_step sees the gradients of the stages of its own rank" in caplog.text


@pytest.mark.parametrize("labels", [[1, None], ["a", "b"], [[1], [2, 3]], np.array(["a", "b"]), torch.arange(2)])
def test_any_labels_identify_the_samples(labels: Any) -> None:
    assert _bytes_of(labels) == _bytes_of(labels)
    assert _bytes_of(labels) != _bytes_of(labels[:1])
