"""`test=best` tests the best checkpoint of the training instead of the last weights, and `ckpt_path=best` finds it."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onecurve.config import command_line
from onecurve.config.command_line import complete_overrides
from onecurve.errors import UserError
from onecurve.records.files import CHECKPOINTS, CONFIG
from onecurve.run import ckpt_path
from onecurve.run.experiment import run_experiment
from tests.support.commands import run_here
from tests.support.experiments import SHORT, SHORT_EPOCH
from tests.support.pool import Pool
from tests.support.runs import compose

# The learning rate falls, so that the first of two epochs has the greatest one.
BEST_IS_FIRST = ["experiment=parity", *SHORT, "callbacks.best.monitor=lr", "scheduler=cosine", "trainer.max_steps=10"]


@pytest.fixture(scope="module")
def best(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Return the best checkpoint of a run in a single process, and its test loss."""
    folder = tmp_path_factory.mktemp("single") / "run"
    tested = run_experiment(compose(folder, *small, *BEST_IS_FIRST, "test=best")).metrics
    file = folder / CHECKPOINTS / "best.ckpt"
    evaluation = [*small, "experiment=parity", *SHORT, "fit=false", f"ckpt_path={file}"]
    expected = run_experiment(compose(folder.parent / "evaluation", *evaluation)).metrics
    assert tested["test/loss"] == expected["test/loss"]
    assert tested["val/loss"] != torch.load(file)["metrics"]["val/loss"], "the last weights are others"
    return file, expected["test/loss"]


@pytest.mark.parametrize(
    "strategy", ["pipeline", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "ddp_spawn"))]
)
def test_tests_the_best_checkpoint(
    strategy: str, best: tuple[Path, float], pool: Pool, small: list[str], folder: Path
) -> None:
    world = [f"strategy={strategy}", "trainer.devices=2"]
    cfg = compose(folder, *small, *BEST_IS_FIRST, *world, "test=best", "callbacks=[default,evaluation]")
    tested = run_experiment(cfg) if strategy == "ddp_spawn" else pool.run(2, run_experiment, cfg)[0]
    assert tested.metrics["test/loss"] == pytest.approx(best[1], rel=1e-9)
    assert torch.load(folder / CHECKPOINTS / "best.ckpt")["global_step"] == SHORT_EPOCH
    steps = {
        stage: json.loads((folder / "evaluation" / f"{stage}.json").read_text())["step"] for stage in ("val", "test")
    }
    assert steps == {"val": 2 * SHORT_EPOCH, "test": SHORT_EPOCH}


def test_finds_the_newest_run(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "PROJECT", tmp_path)
    with pytest.raises(UserError, match=r"ckpt_path=last: there is no run with a checkpoint in .*/runs"):
        complete_overrides(["ckpt_path=last"])
    older, job, evaluation = (tmp_path / "runs" / name for name in ("older", "sweep/0", "evaluation"))
    for time, (run_dir, names) in enumerate([(older, ["best", "last"]), (job, ["last"]), (evaluation, [])]):
        (run_dir / CHECKPOINTS).mkdir(parents=True)
        (run_dir / CONFIG).write_text("runtime: {overrides: []}")
        os.utime(run_dir / CONFIG, (time, time))
        for name in names:
            (run_dir / CHECKPOINTS / f"{name}.ckpt").touch()
    assert complete_overrides(["ckpt_path=last", "seed=1"]) == [f"ckpt_path='{job}'", "seed=1"]
    assert capsys.readouterr().err == f"ckpt_path=last: the newest run is {job}\n"
    assert complete_overrides(["ckpt_path=best"]) == [f"ckpt_path='{job}/checkpoints/best.ckpt'"]
    best = older / CHECKPOINTS / "best.ckpt"
    assert complete_overrides([f"init_from={older}/best", "ckpt_path=a/best"]) == [
        f"init_from='{best}'",
        "ckpt_path=a/best",
    ]


def test_best_from_the_command_line(best: tuple[Path, float], small: list[str], folder: Path) -> None:
    words = [*small, "experiment=parity", *SHORT, "fit=false", "trainer.accelerator=cpu", "logger=none"]
    evaluated, _ = run_here(*words, f"ckpt_path={best[0].parents[1]}/best", f"run_dir={folder}")
    assert f"test/loss {best[1]:.4f}" in evaluated


def test_ranks_test_the_checkpoint_of_rank_zero(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A metric without sync_dist differs between the ranks, and so do names that contain it."""
    callback: Any = SimpleNamespace(monitor="val/acc", best_model_path="acc0.5.ckpt")
    strategy = SimpleNamespace(broadcast=lambda _: "acc0.4.ckpt", reduce_boolean_decision=lambda equal: equal)
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[callback], strategy=strategy)
    monkeypatch.setattr(ckpt_path.dist, "is_initialized", lambda: True)
    assert ckpt_path.best_checkpoint(trainer) == "acc0.4.ckpt"
    assert "val/acc differs between the ranks, and rank zero's is taken: log it with sync_dist=True" in caplog.text
