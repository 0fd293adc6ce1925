"""What an evaluation records is exact, the same under every strategy, and costs no host-device synchronization."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchmetrics.functional.classification import multiclass_calibration_error, multiclass_confusion_matrix

from src.engine.observe.evaluation import EvaluationSums
from src.engine.run.experiment import run
from src.engine.utils.errors import UserError
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


def rounded(value: Any) -> Any:
    """Round all numbers to nine digits."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def run_and_read(folder: Path, pool: Pool, overrides: list[str]) -> list[dict[str, Any]]:
    cfg = compose(folder, *overrides)
    pool.run(cfg.trainer.devices, run, cfg)
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
    run(compose(folder, *small, *EVALUATION, *CLASSIFIER))
    return folder


@pytest.mark.parametrize(("strategy", "devices"), [("fsdp", 2), ("hybrid", 4)])
def test_files_are_those_of_a_single_process(
    strategy: str, devices: int, reference: Path, small: list[str], pool: Pool, folder: Path
) -> None:
    world = [f"strategy={strategy}", f"trainer.devices={devices}"]
    files = run_and_read(folder, pool, [*small, *EVALUATION, *CLASSIFIER, *world])
    assert rounded(files) == rounded(read(reference))


def test_file_has_every_sample_once(reference: Path) -> None:
    for evaluation, samples in zip(read(reference), (10, 25), strict=True):
        assert evaluation["step"] == SHORT_EPOCH
        assert np.array(evaluation["confusion"]).sum() == samples
        assert sum(row["count"] for row in evaluation["calibration"]["bins"]) == samples
        assert len(evaluation["classes"]) == len(evaluation["confusion"])


def test_metrics_are_those_of_the_file(reference: Path) -> None:
    header, *rows = [line.split(",") for line in (reference / "metrics.csv").read_text().splitlines()]
    last = {name: row[number] for row in rows for number, name in enumerate(header) if row[number]}
    for stage, evaluation in zip(("val", "test"), read(reference), strict=True):
        confusion = torch.tensor(evaluation["confusion"])
        assert float(last[f"{stage}/calibration_error"]) == pytest.approx(evaluation["calibration"]["error"])
        for name, counts, correct in zip(evaluation["classes"], confusion, confusion.diag(), strict=True):
            if counts.sum():
                assert float(last[f"{stage}_class/{name}"]) == pytest.approx(float(correct / counts.sum()))
        assert float(last[f"{stage}/acc"]) == pytest.approx(float(confusion.diag().sum() / confusion.sum()))


def test_module_of_the_user_that_returns_its_logits(small: list[str], pool: Pool, tmp_path: Path, folder: Path) -> None:
    """Its pairs have no padding, so that the ranks evaluate different numbers of samples."""
    task = [*small, *EVALUATION, *plain("tests.engine.observe.test_evaluation.ReturnsLogits", tmp_path)]
    run(compose(folder / "single", *task))
    two = run_and_read(folder, pool, [*task, "strategy=ddp", "trainer.devices=2"])
    assert rounded(two) == rounded(read(folder / "single"))


def test_refuses_a_module_that_returns_no_logits(small: list[str], tmp_path: Path, folder: Path) -> None:
    task = [*small, *EVALUATION, *plain("tests.support.modules.Plain", tmp_path)]
    message = r"callbacks.evaluation is for classification .* let Plain.validation_step return them, .* \(10, 10\)"
    with pytest.raises(UserError, match=message):
        run(compose(folder, *task))
    assert not (folder / "evaluation").exists()
    assert not list(folder.glob("checkpoints/*")), "it is refused before training"


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return batches of logits, labels and weights; one in ten samples is padding."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(600, 5, generator=generator, dtype=torch.double).mul_(2)
    logits[100:200] *= 1000  # their probabilities are one
    label = torch.randint(5, (600,), generator=generator)
    weight = (torch.arange(600) % 10 > 0).double()
    return list(zip(logits.split(50), label.split(50), weight.split(50), strict=True))


def test_sums_are_those_of_torchmetrics_without_the_padding() -> None:
    sums = EvaluationSums(5, torch.device("cpu"))
    for batch in batches():
        sums.update(*batch)
    logits, label, weight = map(torch.cat, zip(*batches(), strict=True))
    logits, label = logits[weight > 0], label[weight > 0]
    assert torch.equal(sums.confusion, multiclass_confusion_matrix(logits, label, 5))
    counts, confidences, correct = sums.bins.T
    assert counts.tolist() == torch.histogram(logits.softmax(1).max(1).values, 15, range=(0, 1)).hist.tolist()
    error = (correct - confidences).abs().sum() / counts.sum()
    in_float32 = float(multiclass_calibration_error(logits, label, 5, n_bins=15))
    assert error == pytest.approx(in_float32, rel=1e-6)


def test_update_does_not_wait_for_the_device() -> None:
    sums = EvaluationSums(5, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):  # raises an error if a value is read
        sums.update(*batches()[0])
