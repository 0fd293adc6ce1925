"""A loss that does not divide by samples is found in the first step on ranks or micro-batches."""

import logging
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset
from torchmetrics import MeanMetric

import onecurve
from onecurve.checks.loss import LossCheck
from onecurve.data.layout import DataParallelInfo
from onecurve.errors import UserError
from onecurve.run.experiment import assemble, run_experiment
from tests.support.habits import Meter, VectorData, Vectors
from tests.support.pool import Pool, RankFailed
from tests.support.runs import compose, fit, fit_ranks

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
OWN += ["trainer.log_every_n_steps=1", "trainer.max_epochs=1", "+data._target_=tests.support.habits.VectorData"]
VECTORS = [*OWN, "+module._target_=tests.support.habits.Vectors"]
DIVIDED = [["strategy=ddp", "trainer.devices=2"], ["trainer.accumulate_grad_batches=2"]]
FOUND = {
    "class_weights": r"training_step does not divide by samples: the loss of 17 samples is [\d.]+, and .* Set bit_",
    "triplets": "does not divide by samples",
    "numpy_mixup": r"draws numbers of NumPy or Python for each sample, .* Set bit_exact=true",
}


@pytest.mark.parametrize("divided", DIVIDED, ids=" ".join)
@pytest.mark.parametrize("kind", FOUND)
def test_found(kind: str, divided: list[str], pool: Pool, folder: Path) -> None:
    cfg = compose(folder, *VECTORS, f"+module.kind={kind}", *divided)
    with pytest.raises((UserError, RankFailed), match=FOUND[kind]):
        fit_ranks(cfg, pool)
    assert not list((folder / "checkpoints").glob("*"))


@pytest.mark.parametrize("kind", ["mean", *FOUND])
def test_one_device_is_not_asked(kind: str, folder: Path) -> None:
    run_experiment(compose(folder, *VECTORS, f"+module.kind={kind}"))


class Sorted(VectorData):
    """One class after the other, as in folders of images."""

    def _samples(self, count: int, seed: int) -> TensorDataset:
        x, y = super()._samples(count, seed).tensors
        order = y.argsort()
        return TensorDataset(x[order], y[order])


class TwoClasses(VectorData):
    """Two classes in turn, so that halves of even numbers have as many of each."""

    def _samples(self, count: int, seed: int) -> TensorDataset:
        return TensorDataset(super()._samples(count, seed).tensors[0], torch.arange(count) % 2)


@pytest.mark.parametrize("data", ["Sorted", "TwoClasses"])
def test_found_whatever_the_order_of_the_classes(data: str, folder: Path) -> None:
    words = [*VECTORS[:-2], f"+data._target_={__name__}.{data}", VECTORS[-1], "+module.kind=class_weights"]
    for size in (8, 16, 32):  # of a step, of which each of two micro-batches has half
        with pytest.raises(UserError, match="does not divide by samples"):
            run_experiment(compose(folder / str(size), *words, f"+data.batch_size={size}", *DIVIDED[1]))


class RareClass(VectorData):
    """Two of 150 samples are of the third class, so that few draws of samples have one."""

    def _samples(self, count: int, seed: int) -> TensorDataset:
        x, y = super()._samples(count, seed).tensors
        return TensorDataset(x, torch.zeros_like(y).index_fill_(0, torch.tensor([8, 26]), 2))


def test_later_steps_find_what_the_first_does_not(folder: Path) -> None:
    words = [*VECTORS[:-2], f"+data._target_={__name__}.RareClass", VECTORS[-1], "+module.kind=class_weights"]
    with pytest.raises(UserError, match="does not divide by samples"):
        run_experiment(compose(folder, *words, "+data.batch_size=16", "trainer.max_epochs=9", *DIVIDED[1]))
    assert len((folder / "metrics.csv").read_text().splitlines()) > 1  # after a step


class ChangesGradients(Vectors):
    """Clips the gradient of a weight, or normalizes that of an activation, of whatever samples a pass has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)), kind
        if kind == "clips":
            next(self.net.parameters()).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, relu, last = self.net
        hidden = relu(first(batch[0]))
        if self.kind == "normalizes" and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / gradient.norm())
        loss = F.cross_entropy(last(hidden), batch[1])
        if self.kind == "weights" and loss.requires_grad:  # as the adaptive weight of VQGAN
            loss = loss + torch.autograd.grad(loss, [*last.parameters()], create_graph=True)[0].norm()
        return loss


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("clips", "the gradient of ChangesGradients.training_step does not divide .* in configure_gradient_clipping"),
        ("normalizes", "the gradient of ChangesGradients.training_step does not divide"),
        ("weights", "ChangesGradients.training_step does not divide by samples: the loss of"),
    ],
)
def test_gradients_that_depend_on_the_samples_together_are_found(kind: str, message: str, folder: Path) -> None:
    words = [*OWN, f"+module._target_={__name__}.ChangesGradients", f"+module.kind={kind}", *DIVIDED[1]]
    with pytest.raises(UserError, match=message):
        run_experiment(compose(folder, *words))


class WithoutNumber(ChangesGradients):
    """A step that does not take `batch_idx`, which Lightning allows."""

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


def test_a_step_without_the_number_of_its_batch_is_checked(folder: Path) -> None:
    words = [*OWN, f"+module._target_={__name__}.WithoutNumber", "+module.kind=weights", *DIVIDED[1]]
    with pytest.raises(UserError, match=r"WithoutNumber\.training_step does not divide by samples"):
        run_experiment(compose(folder, *words))


class OfOneLength(VectorData):
    """A batch sampler whose batches have sequences of one length each, and others a sampler that leaves samples out."""

    def __init__(self, kind: str, batch_size: int = 32) -> None:
        super().__init__(batch_size)
        self.kind = kind

    def train_dataloader(self) -> DataLoader[Any]:
        x, y = self._samples(96, 0).tensors
        repeats = torch.arange(96) // 32 + 1
        if self.kind == "subset":
            y[32:] = -100  # which the loss ignores
            return DataLoader(TensorDataset(x, y), 16, sampler=SubsetRandomSampler(range(32)))
        dataset = [(x[i].expand(int(repeats[i]), -1), y[i]) for i in range(96)]
        batches = [list(range(first, first + 16)) for first in range(0, 96, 16)]
        return DataLoader(cast(Any, dataset), batch_sampler=batches)


class MeanOfTokens(Vectors):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 3))  # without batch normalization
        self.teacher = nn.Sequential()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.kind == "subset":
            return F.cross_entropy(self.net(x), y)
        return F.cross_entropy(self.net(x).flatten(0, 1), y.repeat_interleave(x.shape[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """There is no teacher."""


@pytest.mark.parametrize("kind", ["lengths", "subset"])
def test_samples_are_those_that_the_loader_puts_together(kind: str, folder: Path) -> None:
    words = [*OWN[:-1], f"+data._target_={__name__}.OfOneLength", f"+module._target_={__name__}.MeanOfTokens"]
    words += [f"+data.kind={kind}", f"+module.kind={kind}", "trainer.limit_val_batches=0"]
    run_experiment(compose(folder, *words, "trainer.accumulate_grad_batches=2"))


class CountsSteps(Vectors):
    """Divides by samples, and has state of every kind, which the check must leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.losses, self.seen = 0, list[Tensor](), MeanMetric()
        self.register_buffer("running", torch.zeros(()))

    def mean(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = super().mean(x, y, batch_idx)
        self.steps += 1
        self.losses.append(loss.detach())
        self.seen.update(loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert self.steps == len(self.losses) == self.seen._update_count == batch_idx + 1


def test_leaves_no_trace(pool: Pool, folder: Path) -> None:
    words = [*OWN, f"+module._target_={__name__}.CountsSteps", "trainer.precision=64-true"]
    one = fit(compose(folder / "one", *words))
    for record in fit_ranks(compose(folder / "two", *words, *DIVIDED[0]), pool):
        assert all(torch.allclose(record.final[name], value, rtol=1e-9) for name, value in one.final.items())


class OfTwoKinds(Vectors):
    """Trains and evaluates by different code, as a detector does, so that it cannot be checked."""

    def class_weights(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        if not self.training:
            raise ValueError("no loss in evaluation mode")
        return super().class_weights(x, y, batch_idx)


def test_a_module_without_a_loss_in_evaluation_mode_is_not_checked(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [*OWN, f"+module._target_={__name__}.OfTwoKinds", "+module.kind=class_weights"]
    fit(compose(folder, *words, "trainer.accumulate_grad_batches=2"))
    assert "not checked whether the loss divides by samples: no loss in evaluation mode; if one does not" in caplog.text


class Collects(Vectors):
    """Logs means of what its steps have put into containers and an object."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: dict[str, list[Tensor]] = {"train": [], "val": []}
        self.lists, self.queue, self.meter = defaultdict[str, list[float]](list), deque[float](maxlen=100), Meter()

    def mean(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():  # a constraint, which a second time changes nothing
            for weight in self.net.parameters():
                weight.clamp_(-0.9, 0.9)
        loss = super().mean(x, y, batch_idx)
        self.outs["train"].append(loss.detach())
        self.lists["train"].append(float(loss.detach()))
        self.queue.append(float(loss.detach()))
        self.meter.update(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.outs["val"].append((self.net(batch[0]).argmax(1) == batch[1]).float())

    def on_train_epoch_end(self) -> None:
        means: list[Any] = [torch.stack(self.outs["train"]).mean(), np.mean(self.lists["train"]), np.mean(self.queue)]
        means.append(self.meter.sum / self.meter.count)
        self.log_dict({f"mean_{number}": float(mean) for number, mean in enumerate(means)}, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_acc", self.all_gather(torch.cat(self.outs["val"])).mean())
        self.outs["val"].clear()


@pytest.mark.parametrize("divided", DIVIDED, ids=" ".join)
def test_containers_and_objects_of_a_module_get_no_pass_of_the_check(
    divided: list[str], pool: Pool, folder: Path
) -> None:
    words = [*OWN[:-1], f"+data._target_={__name__}.EvenData", f"+module._target_={__name__}.Collects"]
    words.append("trainer.precision=64-true")
    one = fit(compose(folder / "one", *words)).metrics
    for record in fit_ranks(compose(folder / "two", *words, *divided), pool):
        for name in ("val_acc", "mean_0", "mean_1", "mean_2", "mean_3"):
            assert record.metrics[name] == pytest.approx(one[name], rel=1e-6), name


class EvenData(VectorData):
    """Batches that divide evenly, so that a plain mean of parts is that of the samples."""

    def _samples(self, count: int, seed: int) -> TensorDataset:
        return super()._samples(count // 32 * 32, seed)


class Momentum(Vectors):
    """Begins a step with an update of its encoder and of a schedule, and so is the mean of samples in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.annealer = {"steps": [0]}

    def mean(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        self.annealer["steps"][0] += 1
        with torch.no_grad():
            for student, teacher in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                teacher.mul_(0.9).add_(0.1 * student + 0.1)
            target = self.teacher(x)
        return F.mse_loss(self.net(x), target) / self.annealer["steps"][0]


def test_each_pass_of_the_check_begins_with_the_same_module(folder: Path) -> None:
    words = [*OWN, f"+module._target_={__name__}.Momentum"]
    trainer, module, data = assemble(compose(folder, *words))
    check = next(callback for callback in trainer.callbacks if isinstance(callback, LossCheck))
    check.is_always_due = True  # on one process, which has no passes that begin anew
    trainer.fit(module, datamodule=data)
    assert check.result.endswith("samples is the mean of those of their halves")


class CountsItsSteps(Vectors):
    """Assigns a new tensor as a buffer in each step."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps = self.steps + 1
        return super().training_step(batch, batch_idx)


def test_a_buffer_that_is_assigned_anew_counts_no_pass_of_the_check(pool: Pool, folder: Path) -> None:
    words = [*OWN, f"+module._target_={__name__}.CountsItsSteps"]
    alone = fit(compose(folder / "alone", *words)).final["steps"]
    assert [rank.final["steps"] for rank in fit_ranks(compose(folder, *words, *DIVIDED[0]), pool)] == [alone, alone]


class Evaluates(Vectors):
    """Logs means in a validation: over samples, over the weights of classes, and over the samples of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.weighted = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        outputs, weight = self.net(x), x.new_tensor([1.0, 2.0, 4.0])
        weights, losses = weight[y], F.cross_entropy(outputs, y, weight, reduction="none")
        self.log_dict({"val_loss": F.cross_entropy(outputs, y), "val_acc": (outputs.argmax(1) == y).float().mean()})
        self.log("val_weighted_loss", F.cross_entropy(outputs, y, weight))
        self.weighted.update(losses / weights, weights)
        self.log("val_weighted_metric", self.weighted)
        is_first = y == 0
        self.log("val_first", losses[is_first].mean(), batch_size=int(is_first.sum()))
        self.log("val_most", losses.max(), reduce_fx="max")


class CountsInTraining(Vectors):
    """Logs a number of samples as if it were a mean, a mean as if it were a sum, and both as what they are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_first = (batch[1] == 0).double()
        self.log_dict({"number": is_first.sum(), "share": is_first.mean()}, sync_dist=True)
        self.log("right", is_first.sum(), sync_dist=True, reduce_fx="sum")
        self.log("doubled", is_first.mean(), sync_dist=True, reduce_fx=torch.sum)
        self.log("most", is_first.max(), sync_dist=True, reduce_fx="max")
        self.log("most_of_mean", batch[0].mean(), sync_dist=True, reduce_fx="max")
        return super().training_step(batch, batch_idx)


def test_a_number_of_training_that_is_no_mean_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(compose(folder, *OWN, f"+module._target_={__name__}.CountsInTraining", "trainer.accumulate_grad_batches=2"))
    lines = [line.partition(" over samples")[0] for line in caplog.messages if " over samples" in line]
    assert sorted(lines) == ["doubled is no sum", "most_of_mean is no max", "number is no mean"]


def test_a_metric_that_is_no_mean_over_samples_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The others have the values of a run on one process."""
    words = [*OWN, f"+module._target_={__name__}.Evaluates", "trainer.precision=64-true"]
    one = fit(compose(folder / "one", *words)).metrics
    assert "no mean over samples" not in caplog.text
    two = fit(compose(folder / "two", *words, "trainer.accumulate_grad_batches=2")).metrics
    (line,) = [line for line in caplog.messages if "no mean over samples" in line]
    assert line.startswith("val_weighted_loss is no mean over samples: of 17 samples it is ")
    for name in ("val_loss", "val_acc", "val_weighted_metric", "val_first", "val_most"):
        assert float(two[name]) == pytest.approx(float(one[name]), rel=1e-9)
    assert float(two["val_weighted_loss"]) != pytest.approx(float(one["val_weighted_loss"]), rel=1e-6)


class MeansOfBatches(Vectors):
    """Updates metrics by a mean without its weight, with it, once for each sample, and in training."""

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.ModuleDict({name: MeanMetric() for name in ("plain", "weighted", "single", "trained")})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.means["trained"](batch[0].mean())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.means["plain"](losses.mean())
        self.means["weighted"](losses.mean(), weight=len(losses))
        for loss in losses:
            self.means["single"](loss)


def named_means(folder: Path, size: int) -> list[str]:
    """Return the metrics that a rank names as means over batches."""
    words = [*OWN, f"+module._target_={__name__}.MeansOfBatches", f"+data.batch_size={size}", *DIVIDED[0]]
    with mock.patch.object(logging.getLogger("onecurve.checks.loss"), "warning") as warn:
        run_experiment(compose(folder, *words))
    return sorted(call.args[1] for call in warn.call_args_list if "MeanMetric" in call.args[0])


@pytest.mark.parametrize(("size", "uneven"), [(32, []), (33, ["means.trained"])])
def test_a_mean_over_batches_is_named(size: int, uneven: list[str], pool: Pool, folder: Path) -> None:
    assert pool.run(2, named_means, folder, size) == [["means.plain", *uneven]] * 2


class MeanOfClasses(MeanMetric):
    """Has a mean for each of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean_value", "weight"):
            self.add_state(name, torch.zeros(10), "sum")

    def update(self, losses: Any, classes: Any) -> None:  # type: ignore[override]
        self.mean_value.index_add_(0, classes, losses)
        self.weight.index_add_(0, classes, torch.ones_like(losses))


class MeansOfItsOwn(Vectors):
    """Has a metric of the user's, and makes one for each class when its first sample comes."""

    def __init__(self) -> None:
        super().__init__()
        self.together, self.classes = MeanOfClasses(), nn.ModuleDict()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.together.update(losses, batch[1])
        for loss, number in zip(losses, batch[1].tolist(), strict=True):
            if str(number) not in self.classes:
                self.classes[str(number)] = MeanMetric()
            cast(MeanMetric, self.classes[str(number)]).update(loss)


def test_means_of_other_kinds_end_no_check(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = [*OWN, f"+module._target_={__name__}.MeansOfItsOwn", *DIVIDED[1]]
    check = LossCheck._warn_of_batch_means
    with mock.patch.object(LossCheck, "_warn_of_batch_means", autospec=True, side_effect=check) as warn:
        fit(compose(folder, *words))
    assert warn.called  # a step that fails is not checked
    assert "MeanMetric" not in caplog.text


def test_a_mean_over_batches_is_right_on_one_process(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(compose(folder, *OWN, f"+module._target_={__name__}.MeansOfBatches"))
    assert "MeanMetric" not in caplog.text


def time_first(samples: list[Any]) -> Any:
    """Return sequences of 1 to 7 times the same vector, (time, samples, 16), padded by nan, and targets."""
    sequences = [x.expand(1 + int(50 * x[0].abs()) % 7, -1) for x, _ in samples]
    return nn.utils.rnn.pad_sequence(sequences, padding_value=torch.nan), torch.stack([y for _, y in samples])


class Sequences(VectorData):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._samples(150, 0), self.batch_size, shuffle=True, collate_fn=time_first)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._samples(37, 1), self.batch_size, collate_fn=time_first)


class OfSequences(Vectors):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0].nanmean(0), batch[1]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((batch[0].nanmean(0), batch[1]), batch_idx)


class NormalizesPadding(Vectors):
    """A loss of each sequence's first vector, which padding changes by the statistics of a batch only."""

    def __init__(self, is_flat: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(16, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 3, 1)]
        if is_flat:
            layers = [nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)]
        self.net, self.teacher, self.is_flat = nn.Sequential(*layers), nn.Sequential(), is_flat

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[0].nan_to_num().transpose(0, 1), batch[1]
        if self.is_flat:  # a row for each vector
            logits = self.net(x.flatten(0, 1)).unflatten(0, x.shape[:2])[:, 0]
        else:
            logits = self.net(x.transpose(1, 2))[..., 0]
        return F.cross_entropy(logits, y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """There is no teacher."""


FLAT = ["+module.is_flat=true", "virtual_ranks=1"]  # of two micro-batches each is a group


@pytest.mark.parametrize(
    ("divided", "options"),
    [(divided, options) for divided in DIVIDED for options in ([], ["virtual_ranks=2"])] + [(DIVIDED[0], FLAT)],
    ids=str,
)
def test_padding_that_batch_normalization_counts_is_found(
    divided: list[str], options: list[str], pool: Pool, folder: Path
) -> None:
    words = [*OWN[:-1], f"+data._target_={__name__}.Sequences", f"+module._target_={__name__}.NormalizesPadding"]
    words += ["+data.batch_size=8", "trainer.limit_val_batches=0", *options]
    with pytest.raises((UserError, RankFailed), match="have padded theirs to different lengths: pad all"):
        fit_ranks(compose(folder, *words, *divided), pool)
    if options is not FLAT:
        fit(compose(folder / "bits", *words, "bit_exact=true"))


def test_a_mean_is_weighted_by_samples_if_sequences_come_time_first(folder: Path) -> None:
    """Lightning's weight would be the length to which a batch is padded."""
    words = [*OWN[:-1], f"+data._target_={__name__}.Sequences", f"+module._target_={__name__}.OfSequences"]
    one, two = (
        fit(compose(folder / name, *words, "trainer.precision=64-true", f"trainer.accumulate_grad_batches={parts}"))
        for name, parts in (("one", 1), ("two", 2))
    )
    for name in ("train_loss_epoch", "val_loss"):
        assert float(two.metrics[name]) == pytest.approx(float(one.metrics[name]), rel=1e-9)


def test_manual_optimization_is_named(caplog: pytest.LogCaptureFixture) -> None:
    parts: dict[str, Any] = {"division": SimpleNamespace(is_divided=True), "parallel": DataParallelInfo(2)}
    data = SimpleNamespace(**parts, has_one_size=True, evaluates=lambda name: False)
    module = BoringModel()
    module.automatic_optimization = False
    LossCheck().on_fit_start(cast(Any, SimpleNamespace(datamodule=data)), module)
    assert "the module optimizes manually; if one does not, each number of processes is another run" in caplog.text


class OfTwoLoaders(BoringModel):
    """Adds the losses of the batches of two loaders."""

    def __init__(self, divides: bool) -> None:
        super().__init__()
        self.divides = divides

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = [self.layer(one) for one in batch.values()]
        return torch.stack([one.square().mean() if self.divides else one.std() for one in outputs]).sum()


@pytest.mark.parametrize("divides", [True, False])
def test_halves_have_equal_parts_of_each_loader(divides: bool, folder: Path) -> None:
    """A part of the step has 6 and 3 samples, of which three cannot be halved."""
    loaders = {name: DataLoader(RandomDataset(32, 4 * size), size) for name, size in {"a": 12, "b": 6}.items()}
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": folder}
    trainer = onecurve.Trainer(**options, accumulate_grad_batches=2)
    if divides:
        trainer.fit(OfTwoLoaders(divides), loaders)
        assert trainer.global_step == 4
        return
    with pytest.raises(UserError, match="does not divide by samples: the loss of 4 samples"):
        trainer.fit(OfTwoLoaders(divides), loaders)
