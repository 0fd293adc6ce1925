"""The moving average follows its formula under every strategy; evaluation and checkpoints use it."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from onecurve.config.resolve import runs_in_single_process
from onecurve.run.experiment import run_experiment
from tests.support.comparison import TOLERANCE, relative
from tests.support.experiments import SHORT, SHORT_STEPS
from tests.support.interruption import die
from tests.support.pool import Pool
from tests.support.runs import STRATEGIES, compose, fit

TASK = ["experiment=parity", *SHORT, "callbacks=[default,ema]", "callbacks.ema.decay=0.8"]


class ReferenceAverage(L.Callback):
    """The moving average computed by its formula after every step."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.steps = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.average = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.steps:
            return
        self.steps += 1
        decay = min(0.8, (1 + self.steps) / (10 + self.steps))
        for name, tensor in pl_module.state_dict().items():
            old = self.average[name]
            self.average[name] = decay * old + (1 - decay) * tensor if tensor.is_floating_point() else tensor.clone()


def checkpoint(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert max(relative(found[name], tensor) for name, tensor in expected.items()) < TOLERANCE


@pytest.fixture(scope="module")
def alone(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """Return the folder and the metrics of a run in a single process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return folder, run_experiment(compose(folder, *small, *TASK)).metrics


@pytest.mark.parametrize("accumulate", [1, 2])
def test_average_follows_the_formula(accumulate: int, small: list[str], folder: Path) -> None:
    expected = ReferenceAverage()
    record = fit(compose(folder, *small, *TASK, f"trainer.accumulate_grad_batches={accumulate}"), expected)
    saved = checkpoint(folder)
    check_same(saved["state_dict"], expected.average)
    check_same(saved["training_state_dict"], record.final)
    assert expected.steps == SHORT_STEPS
    moved = [relative(record.final[name], tensor) for name, tensor in expected.average.items() if tensor.ndim > 1]
    assert min(moved) > 1e-4


def test_it_changes_the_evaluation_only(alone: tuple[Path, dict[str, float]], small: list[str], folder: Path) -> None:
    """The weights in training are those of a run without it; the best checkpoint has both, too."""
    plain = fit(compose(folder, *small, "experiment=parity", *SHORT), test=True)
    best = torch.load(alone[0] / "checkpoints" / "best.ckpt", weights_only=True)
    check_same(checkpoint(alone[0])["training_state_dict"], plain.final)
    assert best["state_dict"].keys() == best["training_state_dict"].keys()
    assert alone[1]["test/loss"] != plain.metrics["test/loss"]


@pytest.mark.parametrize("words", [["callbacks=[default,ema]", "fit=false"], ["fit=false"], TASK[-2:]])
def test_evaluates_the_weights_in_the_checkpoint(
    words: list[str], alone: tuple[Path, dict[str, float]], small: list[str], folder: Path
) -> None:
    """With and without the callback, and after a restart of the finished run."""
    task = [*small, "experiment=parity", *SHORT, *words, f"ckpt_path={alone[0]}/checkpoints/last.ckpt"]
    assert run_experiment(compose(folder, *task)).metrics["test/loss"] == pytest.approx(
        alone[1]["test/loss"], rel=TOLERANCE
    )


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=[] if name == "fsdp" else pytest.mark.slow) for name in STRATEGIES],
)
def test_agrees_with_single_process(
    strategy: str, alone: tuple[Path, dict[str, float]], pool: Pool, small: list[str], folder: Path
) -> None:
    """In a run, and in the test of a finished run, where each rank may hold a part of the average."""
    two = [*small, *TASK, f"strategy={strategy}", "trainer.devices=2"]
    for cfg in (compose(folder, *two), compose(folder, *two, f"ckpt_path={alone[0]}/checkpoints/last.ckpt")):
        result = run_experiment(cfg) if runs_in_single_process(cfg) else pool.run(2, run_experiment, cfg)[0]
        for name in ("val/loss", "test/loss"):
            assert result.metrics[name] == pytest.approx(alone[1][name], rel=1e-6)
    for kind in ("state_dict", "training_state_dict"):
        check_same(checkpoint(folder)[kind], checkpoint(alone[0])[kind])


def test_resumes_from_a_save_during_validation(
    alone: tuple[Path, dict[str, float]], pool: Pool, small: list[str], folder: Path
) -> None:
    """The network holds the average then. tests/engine/faults/test_travel.py has saves between steps."""
    pool.run(2, die, compose(folder, *small, *TASK, "strategy=ddp", "trainer.devices=2"), "on_validation_end", 3)
    fit(compose(folder, *small, *TASK, f"ckpt_path={folder}/died.ckpt"))
    for kind in ("state_dict", "training_state_dict"):
        check_same(checkpoint(folder)[kind], checkpoint(alone[0])[kind])


def test_lightnings_average_has_the_statistics_of_all_ranks(pool: Pool, small: list[str], folder: Path) -> None:
    """It takes the running statistics of batch normalization after each step, when each rank has its own groups'."""
    averaging = "+callbacks.averaging={_target_: lightning.pytorch.callbacks.EMAWeightAveraging, decay: 0.8}"
    task = [*small, "experiment=parity", *SHORT, averaging]
    one = run_experiment(compose(folder / "one", *task)).metrics
    two = pool.run(2, run_experiment, compose(folder / "two", *task, "strategy=ddp", "trainer.devices=2"))[0].metrics
    assert two["val/loss"] == pytest.approx(one["val/loss"], rel=1e-6)
    check_same(checkpoint(folder / "two")["state_dict"], checkpoint(folder / "one")["state_dict"])


def test_average_keeps_small_steps_in_half_precision(small: list[str], folder: Path) -> None:
    """In bfloat16 a thousandth of a small difference rounds to zero, so the average would never move."""
    task = [*small, "model=mlp", "model.hidden=[16]", "trainer.precision=bf16-true", "trainer.max_epochs=5"]
    task += ["callbacks=[default,ema]", "data.batch_size=16", "trainer.num_sanity_val_steps=0"]
    record = fit(compose(folder, *task))
    average = checkpoint(folder)["state_dict"]
    name = next(name for name, tensor in average.items() if tensor.ndim > 1)
    assert relative(average[name], record.final[name]) < 0.8 * relative(record.initial[name], record.final[name])
