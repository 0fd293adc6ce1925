"""Any kind of loader trains the same on any hardware: streams, given batches, several loaders, unequal ranks."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

import onecurve
from onecurve.data.layout import DataParallelInfo, Division
from onecurve.data.loaders import EvaluationLoaders, Loaders
from onecurve.data.orders import order_of
from onecurve.errors import UserError
from onecurve.patches.torch import tree_flatten
from onecurve.run.experiment import run_experiment
from tests.support.bits import check_equal_bits
from tests.support.comparison import TOLERANCE, check_resumed, distances, read_rows
from tests.support.interruption import die
from tests.support.loaders import AnyLoader, AnyModule, StatefulStream, leave_out_broken, points
from tests.support.pool import Pool, RankFailed
from tests.support.runs import Record, compose, fit, fit_ranks

NOTHING = ["~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
NOTHING += ["trainer.log_every_n_steps=1", "trainer.max_epochs=2"]
OWN = [*NOTHING, "~data", "+data._target_=tests.support.loaders.AnyLoader"]
OWN += ["+module._target_=tests.support.loaders.AnyModule"]
WAYS = {"together": ["trainer.precision=64-true"], "one by one": ["bit_exact=true"]}
SEVERAL, BATCHES = ("two", "shortest", "longest"), ("stream_of_batches", "batches")
NOT_BY_ROW = (*SEVERAL, "several_crops")  # their batches have no row for each sample, which dropout needs
KINDS = [
    (way, kind) for way in WAYS for kind in ("stream", "sized_stream", "stateful_stream", "batch_sampler", *SEVERAL)
]
KINDS += [
    ("one by one", "broken"),
    ("together", "uneven"),
    ("together", "padded"),
    ("together", "several_crops"),
    *(("one by one", kind) for kind in BATCHES),
]
PLACES = {
    "workers": ["+data.num_workers=2"],
    "ddp x2": ["strategy=ddp", "trainer.devices=2"],
    "ddp x3": ["strategy=ddp", "trainer.devices=3"],
    "fsdp x2": ["strategy=fsdp", "trainer.devices=2"],
    "accumulated": ["trainer.accumulate_grad_batches=2"],
}
QUICK = {("ddp x3", "together", kind) for kind in ("batch_sampler", "uneven")}
QUICK |= {("workers", "together", "stream")}
QUICK |= {("ddp x2", "one by one", kind) for kind in ("two", *BATCHES)}
QUICK |= {("ddp x2", "together", "longest")}  # a test below continues "stateful_stream"
QUICK |= {("fsdp x2", "together", "padded")}


def _cases() -> Iterator[Any]:
    for way, kind in KINDS:
        for place in PLACES:
            # Virtual ranks are not accumulated, and some batches of the sampler do not divide over micro-batches.
            if place != "accumulated" or (way == "together" and kind != "batch_sampler"):
                marks = () if (place, way, kind) in QUICK else pytest.mark.slow
                yield pytest.param(place, way, kind, marks=marks)


def words(way: str, kind: str) -> list[str]:
    dropout = [f"+module.dropout={0.0 if kind in NOT_BY_ROW and way == 'together' else 0.1}"]
    return [*OWN, *WAYS[way], f"+data.kind={kind}", *dropout]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Record]:
    """Return a function that trains on one process."""
    return functools.cache(lambda way, kind: fit(compose(tmp_path_factory.mktemp("one"), *words(way, kind))))


def check_equal(way: str, records: list[Record], reference: Record) -> None:
    if way == "one by one":
        check_equal_bits(records, reference)
        return
    for record in records:
        assert max(distances(record, reference)) < TOLERANCE
    ours, theirs = (read_rows(record.file.parent) for record in (records[0], reference))
    assert len(ours) == len(theirs)
    for row, other in zip(ours, theirs, strict=True):
        for name in ("train/loss", "train/of_epoch", "val/loss"):
            assert (row.get(name) or None) == (other.get(name) or None) or float(row[name]) == pytest.approx(
                float(other[name]), rel=TOLERANCE
            ), (name, row["step"])


@pytest.mark.parametrize(("place", "way", "kind"), _cases(), ids=lambda value: value.replace(" ", "-"))
def test_trains_the_same(
    place: str, way: str, kind: str, one_process: Callable[[str, str], Record], pool: Pool, folder: Path
) -> None:
    cfg = compose(folder, *words(way, kind), *PLACES[place])
    check_equal(way, fit_ranks(cfg, pool), one_process(way, kind))


@pytest.mark.parametrize(
    "kind",
    [
        *("stateful_stream", "batch_sampler", "shortest"),  # the last are several loaders, which a stream ends
        # The end of an epoch of a stream has a test below, as has a forgetful one.
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("stream", "forgetful_stream", "two")),
    ],
)
def test_resumes_within_an_epoch_elsewhere(
    kind: str, one_process: Callable[[str, str], Record], pool: Pool, folder: Path
) -> None:
    whole = one_process("together", kind)
    cfg = compose(folder, *words("together", kind), *PLACES["ddp x2"])
    pool.run(2, die, cfg, "on_train_batch_end", len(whole.losses) // 2 + 2)
    cfg = compose(folder, *words("together", kind), *PLACES["workers"], f"ckpt_path={folder}/died.ckpt")
    check_resumed(fit_ranks(cfg, pool), whole, len(whole.losses) // 2 + 2)


def test_reads_past_what_is_trained_unless_the_state_is_exact(folder: Path) -> None:
    reads = {}
    for kind in ("stateful_stream", "forgetful_stream"):
        cfg = compose(folder / kind, *words("together", kind), "trainer.max_epochs=1")
        die(cfg, "on_train_batch_end", 4)
        StatefulStream.reads.zero_()
        cfg.ckpt_path = f"{cfg.run_dir}/died.ckpt"
        fit(cfg)
        reads[kind] = int(StatefulStream.reads)
    assert reads["forgetful_stream"] - reads["stateful_stream"] >= 48, "the state of a stream saves nothing"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("own_random_stream", PLACES["ddp x2"], "OwnRandomStream yields other samples when .* so each process"),
        ("stream_of_batches", [], "has batch_size=None, and a batch that the dataset makes cannot be divided: set bit"),
        ("broken", PLACES["ddp x2"], "collate_fn makes a batch of . samples from 6, so .* or set bit_exact=true"),
        ("broken", PLACES["accumulated"], "collate_fn makes a batch of . samples from 6"),
        ("early_stream", [], "EarlyStream has ended after 3 of 5 batches: correct its __len__"),
        ("stream", ["trainer.limit_train_batches=0.5"], "limit_train_batches=0.5, but a stream has no length"),
        ("stream", ["trainer.limit_train_batches=9"], "Stream has ended after 5 of 9 batches: .*limit_train_batches"),
        ("one_after_the_other", [], "combines loaders in the mode sequential: training takes a batch of each"),
        ("longest_stream", [], "a stream without a length cannot be combined in the mode max_size_cycle: give it"),
        ("two", ["+data.batch_size=13", *PLACES["ddp x2"]], "different numbers of samples of one of its loaders: set"),
    ],
)
def test_says_what_it_cannot_train(kind: str, options: list[str], message: str, pool: Pool, folder: Path) -> None:
    with pytest.raises((UserError, RankFailed), match=message):
        fit_ranks(compose(folder, *words("together", kind), *options), pool)


class BrokenEvaluation(AnyLoader):
    def val_dataloader(self) -> Any:
        return DataLoader(points(41, 2), 12, collate_fn=leave_out_broken)


def test_refuses_an_evaluation_that_leaves_samples_out(pool: Pool, folder: Path) -> None:
    task = [*words("together", "uneven"), f"data._target_={__name__}.BrokenEvaluation"]
    with pytest.raises(RankFailed, match=r"collate_fn makes a batch of . samples from ., so .* or set bit_exact=true"):
        fit_ranks(compose(folder, *task, *PLACES["ddp x2"]), pool)


class Broken(Dataset[Any]):
    """Two samples are broken, which are all of a virtual rank."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return None if index in (8, 12) else torch.ones(32)


def stack_others_if_any(samples: list[Any]) -> Any:
    others = [sample for sample in samples if sample is not None]
    return torch.stack(others) if others else None


def test_nothing_is_left_of_the_samples_of_a_virtual_rank(folder: Path) -> None:
    trainer = onecurve.Trainer(accelerator="cpu", devices=1, bit_exact=True, default_root_dir=folder, max_epochs=1)
    message = "collate_fn returns None for the samples of .* virtual rank, .* out in the dataset"
    with pytest.raises(UserError, match=message):
        trainer.fit(BoringModel(), DataLoader(Broken(), 8, collate_fn=stack_others_if_any))


class Normalizing(AnyModule):
    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.net.insert(1, torch.nn.BatchNorm1d(16))


@pytest.mark.parametrize("kind", ["two", "batch_sampler"])
def test_refuses_normalization_groups_of_unequal_batches(kind: str, folder: Path) -> None:
    task = [*words("together", kind), f"module._target_={__name__}.Normalizing"]
    with pytest.raises(UserError, match="several loaders give batches of different sizes: set bit_exact=true"):
        fit(compose(folder, *task))
    fit(compose(folder, *task, "bit_exact=true", "trainer.precision=32-true"))


class Manual(AnyModule):
    automatic_optimization = False


def test_refuses_to_weight_a_loss_that_it_does_not_see(pool: Pool, folder: Path) -> None:
    cfg = compose(folder, *words("together", "uneven"), f"module._target_={__name__}.Manual", *PLACES["ddp x3"])
    with pytest.raises(RankFailed, match="Manual averages over the batch of its own process, but the 3 processes have"):
        fit_ranks(cfg, pool)


def test_warns_of_a_stream_that_does_not_repeat_itself(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(compose(folder, *words("together", "clock_stream")))
    assert "so a resumed run would read others" in caplog.text


class Scheduled(AnyModule):
    def configure_optimizers(self) -> Any:
        assert self.trainer.datamodule.total_steps == 6
        return super().configure_optimizers()


def test_a_schedule_asks_for_the_length_of_a_stream(folder: Path) -> None:
    cfg = compose(folder, *words("together", "stream"), f"module._target_={__name__}.Scheduled")
    with pytest.raises(UserError, match="a schedule needs the number of steps: set"):
        fit(cfg)
    cfg = compose(folder, *words("together", "stream"), f"module._target_={__name__}.Scheduled", "trainer.max_steps=6")
    assert len(fit(cfg).losses) == 6


class WithLoaders(BoringModel):
    """Makes its dataset in `setup`, and a layer that depends on it."""

    def setup(self, stage: str) -> None:
        assert not hasattr(self, "dataset")
        self.dataset = points(64, 0)
        self.layer = torch.nn.Linear(len(self.dataset[0][0]), 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return None


@pytest.mark.parametrize("way", WAYS)
def test_takes_the_loaders_of_the_module(way: str, pool: Pool, folder: Path) -> None:
    task = [*NOTHING, "data=module", *WAYS[way], "virtual_ranks=2", f"+module._target_={__name__}.WithLoaders"]
    alone = fit(compose(folder / "one", *task))
    check_equal(way, fit_ranks(compose(folder, *task, *PLACES["ddp x2"]), pool), alone)


def test_trains_the_module_of_lightnings_own_tests(folder: Path) -> None:
    task = [*NOTHING, "data=module", "+module._target_=lightning.pytorch.demos.boring_classes.BoringModel"]
    record = fit(compose(folder, *task, "trainer.limit_train_batches=5"), test=True)
    assert not record.final["layer.weight"].equal(record.initial["layer.weight"])


@pytest.mark.parametrize(
    "moment", ["on_train_batch_start", "on_validation_end", pytest.param("on_train_epoch_end", marks=pytest.mark.slow)]
)
def test_resumes_at_the_end_of_an_epoch_without_a_length(
    moment: str, one_process: Callable[[str, str], Record], folder: Path
) -> None:
    """Lightning knows the last batch before it is trained, and calls it the last until the next epoch begins."""
    task = words("together", "stream")
    whole = one_process("together", "stream")
    cfg = compose(folder, *task)
    die(cfg, moment, 4 if moment == "on_train_batch_start" else 5)
    cfg.ckpt_path = f"{folder}/died.ckpt"
    check_resumed([fit(cfg)], whole, 4 if moment == "on_train_batch_start" else 5)


def test_goes_on_after_the_shorter_loader_has_ended(one_process: Callable[[str, str], Record], folder: Path) -> None:
    whole, cfg = one_process("together", "longest"), compose(folder, *words("together", "longest"))
    die(cfg, "on_train_batch_end", 3)
    cfg.ckpt_path = f"{folder}/died.ckpt"
    check_resumed([fit(cfg)], whole, 3)


def test_predicts_the_samples_of_any_loader(pool: Pool, folder: Path) -> None:
    task = [*words("together", "uneven"), "fit=false", "predict=true"]
    run_experiment(compose(folder / "one", *task))
    pool.run(2, run_experiment, compose(folder / "two", *task, *PLACES["ddp x2"]))
    alone, together = (torch.load(folder / place / "predictions.pt") for place in ("one", "two"))
    for seed, own, other in zip((2, 3), alone, together, strict=True):
        assert own["sample_index"].equal(torch.arange(41 if seed == 2 else 10))
        assert own["predictions"]["x"].equal(points(len(own["sample_index"]), seed).tensors[0].double())
        assert other["sample_index"].equal(own["sample_index"])
        torch.testing.assert_close(other["predictions"], own["predictions"])


class FewerLater(Sampler[list[int]]):
    """Gives a batch less in each later epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([[8 * number + row for row in range(8)] for number in range(4 - self.epoch)])


class Fewer(AnyLoader):
    def uneven(self) -> Any:
        return DataLoader(points(70, 0), batch_sampler=FewerLater())

    def two(self) -> Any:
        return [DataLoader(points(70, 0), 8), DataLoader(points(15, 1), batch_sampler=[[0, 1, 2, 3], [4, 5, 6]])]


def test_refuses_later_epochs_with_fewer_batches(folder: Path) -> None:
    task = [*words("together", "uneven"), f"data._target_={__name__}.Fewer"]
    with pytest.raises(UserError, match="FewerLater gives less in epoch 1 than in the first one"):
        fit(compose(folder, *task))
    assert len(fit(compose(folder, *task, "trainer.limit_train_batches=3")).losses) == 6


def test_refuses_fewer_batches_than_virtual_ranks(folder: Path) -> None:
    task = [*words("one by one", "uneven"), f"data._target_={__name__}.Fewer", "virtual_ranks=8"]
    with pytest.raises(UserError, match=r"the batch_sampler of .* has fewer batches than a step takes, 8: with bit_ex"):
        fit(compose(folder, *task))


def test_refuses_a_later_batch_that_divides_unevenly(pool: Pool, folder: Path) -> None:
    task = [*words("together", "two"), f"data._target_={__name__}.Fewer", f"module._target_={__name__}.First"]
    with pytest.raises(RankFailed, match="the loaders of a step divide unevenly among the processes"):
        fit_ranks(compose(folder, *task, *PLACES["ddp x2"]), pool)


class First(AnyModule):
    """Trains the first of several loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)


def test_sets_the_epoch_of_a_sampler_in_a_batch_sampler() -> None:
    loader = DataLoader(points(70, 0), batch_sampler=BatchSampler(Shifted(), 4, drop_last=False))
    assert [int(order_of(loader, 0, epoch)[0][0]) for epoch in (0, 1)] == [0, 1]


class Shifted(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(range(self.epoch, 60))


class Pairs(BoringModel):
    """Collects the pairs of samples of two loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.pairs += zip(*(numbers.tolist() for numbers in batch), strict=True)
        return super().training_step(torch.ones(2, 32), batch_idx)


def test_each_of_two_loaders_has_an_order_of_its_own(folder: Path) -> None:
    """As in torch: samples of two data sets of one length meet others in each epoch."""
    numbers: Any = range(40)
    module, loaders = Pairs(), [DataLoader(numbers, 8, shuffle=True) for _ in range(2)]
    trainer = onecurve.Trainer(default_root_dir=folder, max_epochs=1, limit_val_batches=0, logger=False)
    trainer.fit(module, loaders)
    ones, others = zip(*module.pairs, strict=True)
    assert sorted(ones) == sorted(others) == list(range(40))
    assert sum(one == other for one, other in module.pairs) < 10


class Replay(IterableDataset[Any]):
    """Yields what the step has added so far."""

    def __init__(self) -> None:
        self.points = [torch.ones(32)]

    def __iter__(self) -> Iterator[Any]:
        for _ in range(8):
            yield self.points[-1]


class Adding(BoringModel):
    is_adding = True

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self.replay = [replay]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.is_adding:
            self.replay[0].points.append(torch.rand(32))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("is_adding", [True, False])
def test_names_a_stream_that_training_changes(is_adding: bool, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    replay = Replay()
    module = Adding(replay)
    module.is_adding = is_adding
    trainer = onecurve.Trainer(default_root_dir=folder, max_epochs=2, limit_val_batches=0, logger=False)
    trainer.fit(module, DataLoader(replay, 4))
    assert ("training has changed Replay while a worker read it" in caplog.text) == is_adding


class Short(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(self.length * 32.0).view(-1, 32).sin())


@pytest.mark.parametrize("length", [16, 18])
def test_checks_a_loss_with_samples_of_a_short_stream(
    length: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which has fewer samples than the checks of the first steps take: those that it lacked made a loss unequal."""
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "limit_val_batches": 0, "logger": False}
    onecurve.Trainer(default_root_dir=folder, max_epochs=2, **options).fit(BoringModel(), DataLoader(Short(length), 8))
    assert "not checked" not in caplog.text


class Playing(BoringModel):
    """Trains what its own weights yield, in a stream that does not end."""

    def train_dataloader(self) -> Any:
        return DataLoader(Played(self.play), 4)

    def play(self) -> Iterator[Any]:
        while True:
            yield self.layer.weight.detach()[0].clone()


class Played(IterableDataset[Any]):
    def __init__(self, play: Callable[[], Iterator[Any]]) -> None:
        self.play = play

    def __iter__(self) -> Iterator[Any]:
        return self.play()


def test_names_a_stream_that_reads_the_weights(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A policy plays with the weights that it has when the worker starts."""
    trainer = onecurve.Trainer(default_root_dir=folder, max_steps=10, limit_val_batches=0, logger=False)
    trainer.fit(Playing())
    assert caplog.text.count("training has changed Played while a worker read it") == 1


class Untouched(IterableDataset[Any]):
    """Holds a layer without numbers, as one that is on another machine."""

    def __init__(self) -> None:
        self.layers = [torch.nn.Linear(2, 2, device="meta"), torch.nn.LazyLinear(2)]

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randn(8, 32))


def test_a_stream_may_hold_weights_without_numbers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = onecurve.Trainer(default_root_dir=folder, max_epochs=1, limit_val_batches=0, logger=False)
    trainer.fit(BoringModel(), DataLoader(Untouched(), 4))
    assert trainer.global_step == 2
    assert "training has changed" not in caplog.text


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True}], ids=["in order", "shuffled", "left"])
def test_names_samples_that_are_never_trained(
    options: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0, "reload_dataloaders_every_n_epochs": 1}
    trainer = onecurve.Trainer(accelerator="cpu", default_root_dir=folder, **arguments)
    module, loader = BoringModel(), DataLoader(RandomDataset(32, 10), batch_size=4, **options)
    trainer.fit(module, loader)
    assert caplog.text.count("the last 2 of 10 samples are never trained") == (not options)
    assert trainer.train_dataloader is loader


class Drawn(IterableDataset[Any]):
    """Draws its samples, and has the number of the epoch in each."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return (torch.rand(32) + self.epoch for _ in range(4))


def evaluation(stream: Any, division: Division) -> EvaluationLoaders:
    loader = DataLoader(stream, 4)
    return EvaluationLoaders(
        "val", Loaders("val_dataloader", [loader], tree_flatten(loader)[1], "sequential"), division, 0, None
    )


def test_a_stream_of_an_evaluation_is_the_same_in_each_epoch() -> None:
    loader, seen = evaluation(Drawn(), Division()).of_rank(torch.device("cpu")), []
    for epoch in (0, 3):
        loader.sampler.set_epoch(epoch)  # as Lightning calls it
        seen.append([part.batch.tolist() for parts in loader for part in parts])
    assert seen[0] == seen[1]


def test_an_evaluation_alone_needs_a_virtual_rank_on_each_rank() -> None:
    with pytest.raises(UserError, match=r"virtual_ranks=2 leaves one of 4 data-parallel ranks without one"):
        evaluation(Drawn(), Division(DataParallelInfo(4), virtual_ranks=2, bit_exact=True))
