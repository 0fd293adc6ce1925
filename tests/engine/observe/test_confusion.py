"""What an evaluation records is exact, and the same under every strategy."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import onecurve
from onecurve.errors import UserError
from onecurve.observe.confusion import Evaluation
from onecurve.run.experiment import run_experiment
from tests.support.comparison import read_rows
from tests.support.experiments import SHORT, SHORT_EPOCH
from tests.support.modules import Plain
from tests.support.pool import Pool
from tests.support.runs import compose

EVALUATION = [
    "experiment=parity",
    *SHORT,
    "trainer.max_epochs=1",
    "callbacks=[default,evaluation]",
    "callbacks.best=null",
]
# Group normalization, because a pipeline's batch normalization sees micro-batches.
CLASSIFIER = ["model.norm=group"]


class ReturnsLogits(Plain):
    """A module that was not written for this template; its steps take pairs and return their logits."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        self.log("val/acc", 0.0)
        return self(batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self(batch[0])


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / "evaluation" / f"{stage}.json").read_text()) for stage in ("val", "test")]


def last_metrics(folder: Path) -> dict[str, float]:
    return {name: float(row[name]) for row in read_rows(folder) for name in row if row[name]}


def run_and_read(folder: Path, pool: Pool, overrides: list[str]) -> list[dict[str, Any]]:
    cfg = compose(folder, *overrides)
    pool.run(cfg.trainer.devices, run_experiment, cfg)
    return read(folder)


def plain(module: str, tmp_path: Path) -> list[str]:
    """Return the overrides that train a module of the user."""
    file = tmp_path / "conf" / "module" / "plain.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"_target_: {module}\n")
    return ["module=plain", "~module.reference_batch_size", f"hydra.searchpath=[file://{tmp_path}/conf]"]


@pytest.fixture(scope="module")
def reference(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run in a single process."""
    folder = tmp_path_factory.mktemp("single") / "run"
    run_experiment(compose(folder, *small, *EVALUATION, *CLASSIFIER))
    return folder


@pytest.mark.parametrize(("strategy", "devices"), [("fsdp", 2), pytest.param("hybrid", 4, marks=pytest.mark.slow)])
def test_files_are_those_of_a_single_process(
    strategy: str, devices: int, reference: Path, small: list[str], pool: Pool, folder: Path
) -> None:
    world = [f"strategy={strategy}", f"trainer.devices={devices}"]
    files = run_and_read(folder, pool, [*small, *EVALUATION, *CLASSIFIER, *world])
    assert files == read(reference)
    ours, theirs = (last_metrics(path) for path in (folder, reference))
    for name in ("val/calibration_error", "test/calibration_error"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6)  # torchmetrics computes it in float32


def test_file_has_every_sample_once(reference: Path) -> None:
    for evaluation, samples in zip(read(reference), (10, 25), strict=True):
        assert evaluation["step"] == SHORT_EPOCH
        assert np.array(evaluation["confusion"]).sum() == samples
        assert len(evaluation["classes"]) == len(evaluation["confusion"])


def test_metrics_are_those_of_the_file(reference: Path) -> None:
    last = last_metrics(reference)
    for stage, evaluation in zip(("val", "test"), read(reference), strict=True):
        confusion = torch.tensor(evaluation["confusion"])
        assert 0 < last[f"{stage}/calibration_error"] < 1
        for name, counts, correct in zip(evaluation["classes"], confusion, confusion.diag(), strict=True):
            if counts.sum():
                assert last[f"{stage}_class/{name}"] == pytest.approx(float(correct / counts.sum()))
        assert last[f"{stage}/acc"] == pytest.approx(float(confusion.diag().sum() / confusion.sum()))


def test_module_of_the_user_that_returns_its_logits(small: list[str], pool: Pool, tmp_path: Path, folder: Path) -> None:
    """Its pairs have no padding, so that the ranks evaluate different numbers of samples."""
    task = [*small, *EVALUATION, *plain("tests.engine.observe.test_confusion.ReturnsLogits", tmp_path)]
    run_experiment(compose(folder / "single", *task))
    two = run_and_read(folder, pool, [*task, "strategy=ddp", "trainer.devices=2"])
    assert two == read(folder / "single")


def test_refuses_a_module_that_returns_no_logits(small: list[str], tmp_path: Path, folder: Path) -> None:
    task = [*small, *EVALUATION, *plain("tests.support.modules.Plain", tmp_path)]
    message = r"callbacks.evaluation is for classification .* let Plain.validation_step return them, .* \(10, 10\)"
    with pytest.raises(UserError, match=message):
        run_experiment(compose(folder, *task))
    assert not (folder / "evaluation").exists()
    assert not list(folder.glob("checkpoints/*")), "it is refused before training"


class Vectors(L.LightningDataModule):
    classes = range(2)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(32, 4, generator=generator), torch.arange(32) % 2)
        return DataLoader(data, 8)

    val_dataloader = test_dataloader = train_dataloader


class Linear(L.LightningModule):
    """Returns its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0])

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_the_step_of_a_tested_checkpoint_is_not_that_of_a_later_validation(tmp_path: Path) -> None:
    trainer = onecurve.Trainer(
        devices=1, max_epochs=1, default_root_dir=tmp_path, enable_progress_bar=False, callbacks=[Evaluation()]
    )
    module, data = Linear(), Vectors()
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=data, ckpt_path="last")
    assert [evaluation["step"] for evaluation in read(tmp_path)] == [8, 4]
