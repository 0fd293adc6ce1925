"""Splits, batch sizes and exact evaluation."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from onecurve.run.experiment import assemble
from onecurve.targets import build
from src.data.augment.pixels import normalize
from tests.support.choices import IMAGES
from tests.support.commands import ROOT
from tests.support.comparison import check_same_rows, read_rows
from tests.support.experiments import SHORT_RUN
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit, fit_ranks

MLP = ["model=mlp", "model.hidden=[16]", "data.batch_size=32"]


def splits(small: list[str], folder: Path, *overrides: str) -> dict[str, torch.Tensor]:
    trainer, _, data = assemble(compose(folder, *small, *MLP, *overrides))
    data.trainer = trainer
    data.setup("fit")
    return {name: split.indices for name, split in data.splits.items()}


def test_validation_split_is_stratified_and_disjoint(small: list[str], folder: Path) -> None:
    _, _, data = assemble(compose(folder, *small, *MLP))
    parts = splits(small, folder)
    assert not set(parts["train"].tolist()) & set(parts["val"].tolist())
    assert sorted(torch.cat([parts["train"], parts["val"]]).tolist()) == list(range(400))
    labels = data.source.load(data.root, "train")[1]
    assert torch.bincount(labels[parts["val"]]).tolist() == [4] * 10
    assert parts["test"].tolist() == list(range(90))


def test_validation_split_depends_on_the_seed(small: list[str], folder: Path) -> None:
    assert torch.equal(splits(small, folder)["val"], splits(small, folder)["val"])
    assert not torch.equal(splits(small, folder)["val"], splits(small, folder, "seed=1")["val"])


def test_environment_variable_sets_the_data_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CIFAR_ROOT", "/somewhere")
    assert compose(folder).data.root == "/somewhere"
    assert compose(folder, "data.root=elsewhere").data.root == "elsewhere"


def test_train_samples_limits_the_training_set(small: list[str], folder: Path) -> None:
    _, _, data = assemble(compose(folder, *small, *MLP))
    labels = data.source.load(data.root, "train")[1]
    for count in (100, 96, 7):
        chosen = splits(small, folder, f"data.train_samples={count}", "data.batch_size=4")["train"]
        assert len(chosen) == count
        assert set(torch.bincount(labels[chosen], minlength=10).tolist()) <= {count // 10, count // 10 + 1}


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("ddp", 4), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("fsdp", "pipeline", "ddp_spawn"))],
)
def test_evaluation_is_exact_on_any_number_of_processes(
    strategy: str, devices: int, alone: Callable[..., Record], short_run: Callable[..., list[Record]], folder: Path
) -> None:
    """Each rank counts metrics in its own memory, and the test starts from zero after validation."""
    uneven = "data.val_fraction=0.13"
    for record in short_run(uneven, f"strategy={strategy}", f"trainer.devices={devices}"):
        assert record.metrics["test/acc"] == alone(uneven).metrics["test/acc"]
    check_same_rows(folder, alone(uneven).file.parent)


def test_evaluation_equals_a_reference_loop(small: list[str], folder: Path) -> None:
    """90 images in batches of 32 leave six padded places in the last batch."""
    cfg = compose(folder, *small, *MLP, "trainer.max_epochs=1")
    record = fit(cfg, test=True)
    _, module, data = assemble(cfg)
    module.load_state_dict(record.final)
    images, labels = data.source.load(data.root, "test")
    logits = module(normalize(images, data.mean, data.std, torch.float32)).detach()
    assert record.metrics["test/acc"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()), abs=1e-7)
    assert record.metrics["test/loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)


@pytest.mark.parametrize("name", IMAGES)
def test_every_class_has_a_name(name: str, folder: Path) -> None:
    data = build(compose(folder, f"data={name}").data)
    assert len(set(data.classes)) == data.num_classes


def test_documented_notebook(small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A fresh process has no resolvers yet."""
    monkeypatch.chdir(ROOT)
    OmegaConf.clear_resolver("project_path")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    exec(code.replace('"data=shapes"', f"*{small}"), {})
    assert "torch.Size([128, 3, 32, 32])" in capsys.readouterr().out


def test_limits_and_intervals_count_steps(small: list[str], folder: Path, pool: Pool) -> None:
    """Neither accumulation nor micro-batches change what a run trains on, and when and on what it validates."""
    limits = ["trainer.limit_train_batches=0.5", "trainer.limit_val_batches=1", "trainer.limit_test_batches=2"]
    task = [*SHORT_RUN, "+trainer.val_check_interval=0.5", *limits]
    places = {
        "alone": ["data.batch_size=8"],
        "accumulating": ["data.batch_size=8", "trainer.accumulate_grad_batches=2"],
        "pipeline": ["data.batch_size=null", "data.batch_size_per_device=4", "strategy.microbatches=2"],
    }
    for name, place in places.items():
        world = ["strategy=pipeline", "trainer.devices=2"] if name == "pipeline" else []
        fit_ranks(compose(folder / name, *small, *task, *place, *world), pool, test=True)
        check_same_rows(folder / name, folder / "alone")
    validated = [row["step"] for row in read_rows(folder / "alone") if row["val/loss"]]
    assert validated == ["1", "3", "6"], "every two of five steps, counted from the start of each epoch"
