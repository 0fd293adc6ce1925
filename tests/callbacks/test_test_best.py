"""`test=best` tests the best checkpoint of the training instead of the last weights, and `ckpt_path=best` finds it."""

import json
import os
from pathlib import Path

import pytest
import torch

from src.checkpoint.run_files import CHECKPOINTS
from src.cli.shorthands import with_found_runs
from src.run import folder as run_folders
from src.run.experiment import run
from src.run.folder import CONFIG
from src.utils.errors import UserError
from tests.support.commands import run_here
from tests.support.experiments import SHORT, SHORT_EPOCH
from tests.support.pool import Pool
from tests.support.runs import compose

# The learning rate falls, so that the first of two epochs has the greatest one.
BEST_IS_FIRST = ["experiment=parity", *SHORT, "callbacks.best.monitor=lr", "scheduler=cosine", "trainer.max_steps=10"]


@pytest.mark.parametrize(
    "strategy", ["auto", "ddp", "fsdp", "pipeline", pytest.param("ddp_spawn", marks=pytest.mark.slow)]
)
def test_tests_the_best_checkpoint(strategy: str, pool: Pool, small: list[str], folder: Path) -> None:
    world = [f"strategy={strategy}", f"trainer.devices={1 if strategy == 'auto' else 2}"]
    cfg = compose(folder, *small, *BEST_IS_FIRST, *world, "test=best", "callbacks=[default,evaluation]")
    tested = run(cfg) if strategy in ("auto", "ddp_spawn") else pool.run(2, run, cfg)[0]
    best = folder / CHECKPOINTS / "best.ckpt"
    assert torch.load(best)["global_step"] == SHORT_EPOCH
    steps = {
        stage: json.loads((folder / "evaluation" / f"{stage}.json").read_text())["step"] for stage in ("val", "test")
    }
    assert steps == {"val": 2 * SHORT_EPOCH, "test": SHORT_EPOCH}
    evaluation = [*small, "experiment=parity", *SHORT, "fit=false"]
    expected = run(compose(folder / "best", *evaluation, f"ckpt_path={best}"))
    assert tested["test/loss"] == pytest.approx(expected["test/loss"], rel=1e-9)
    assert tested["val/loss"] != torch.load(best)["metrics"]["val/loss"], "the last weights are others"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["test=best", "callbacks.best=null"], "test=best needs callbacks.best: leave callbacks.best=null out"),
        (["test=bst"], "test=bst: give true, false or best"),
        (["test=best", "trainer.limit_val_batches=0", "trainer.max_steps=1"], "training has validated nothing"),
    ],
)
def test_refuses_what_it_cannot_test(words: list[str], hint: str, small: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match=hint):
        run(compose(folder, *small, "experiment=parity", *SHORT, *words))


def test_finds_the_newest_run(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_folders, "_PROJECT", tmp_path)
    with pytest.raises(UserError, match=r"ckpt_path=last: there is no run with a checkpoint in .*/runs"):
        with_found_runs(["train.py", "ckpt_path=last"])
    older, job, evaluation = (tmp_path / "runs" / name for name in ("older", "sweep/0", "evaluation"))
    for time, (run_dir, names) in enumerate([(older, ["best", "last"]), (job, ["last"]), (evaluation, [])]):
        (run_dir / CHECKPOINTS).mkdir(parents=True)
        (run_dir / CONFIG).touch()
        os.utime(run_dir / CONFIG, (time, time))
        for name in names:
            (run_dir / CHECKPOINTS / f"{name}.ckpt").touch()
    assert with_found_runs(["train.py", "ckpt_path=last", "seed=1"]) == ["train.py", f"ckpt_path='{job}'", "seed=1"]
    assert capsys.readouterr().err == f"ckpt_path=last: the newest run is {job}\n"
    with pytest.raises(UserError, match=r"ckpt_path=best: there is no best\.ckpt .* \(last\.ckpt\)"):
        with_found_runs(["train.py", "ckpt_path=best"])
    best = older / CHECKPOINTS / "best.ckpt"
    assert with_found_runs([f"init_from={older}/best", "ckpt_path=a/best"]) == [
        f"init_from='{best}'",
        "ckpt_path=a/best",
    ]


def test_best_from_the_command_line(small: list[str], folder: Path) -> None:
    words = ["test=best", "trainer.accelerator=cpu", "logger=none", "trainer.enable_progress_bar=false"]
    trained, _ = run_here(*small, *BEST_IS_FIRST, *words, f"run_dir={folder}")
    evaluated, _ = run_here("fit=false", "test=true", f"ckpt_path={folder}/best", f"run_dir={folder}-evaluation")
    loss = run(
        compose(folder, *small, "experiment=parity", *SHORT, "fit=false", f"ckpt_path={folder}/checkpoints/best.ckpt")
    )
    assert all(f"test/loss {loss['test/loss']:.4f}" in out for out in (trained, evaluated))
