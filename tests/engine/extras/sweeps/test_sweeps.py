"""Real sweeps: failed jobs, stopped sweeps, parallel jobs, Optuna and W&B's agent."""

import csv
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from onecurve.process import signals
from onecurve.run.result import Result
from tests.support.commands import (
    ROOT,
    TINY,
    TORCHRUN,
    TWO,
    callback,
    error_line,
    run,
    run_here,
    slow,
    start,
    wait_for_rows,
    wait_until,
)
from tests.support.wandb_files import read_runs

MLP = [*TINY, "trainer.max_epochs=1", "trainer.enable_progress_bar=false"]
JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
REPORT = callback("Report", folder="'${run_dir}'", lr="'${optimizer.lr}'", random="'${unique_name:}'")


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def reports_of(job: Path) -> list[dict[str, Any]]:
    """Return the reports of a job's ranks, whose values must agree."""
    ranks = [torch.load(file, weights_only=False) for file in sorted(job.glob("report.[0-9]*"))]
    assert all(rank["values"] == ranks[0]["values"] for rank in ranks)
    return ranks


@pytest.mark.parametrize(
    ("fate", "error"), [("kill", "rank 1 died"), pytest.param("memory", "allocate", marks=pytest.mark.slow)]
)
def test_sweep_continues_after_a_failed_job(fate: str, error: str, small: list[str], tmp_path: Path) -> None:
    """Each job has two ranks and a wandb run; in the first job the last rank fails."""
    folder, fates = tmp_path / "sweep", [fate, "nothing"]
    arguments = [
        "-m",
        *small,
        *MLP,
        *TWO,
        callback("FailOnLastRank", what="''"),
        f"callbacks.failonlastrank.what={','.join(fates)}",
        "report=true",
    ]
    out, err = run_here(*arguments, REPORT, f"hydra.sweep.dir={folder}", code=1)
    table = rows(folder / "sweep.csv")
    assert [row["status"] for row in table] == ["failed", "finished"]
    assert [row["overrides"] for row in table] == [f"callbacks.failonlastrank.what={what}" for what in fates]
    assert error in table[0]["error"]
    assert list(table[1])[:4] == ["job", "overrides", "val/acc", "seconds"]
    assert "failed: " in out
    assert "job 0 failed: " in err
    assert len(reports_of(folder / "1")) == 2
    names = ["0", "1", "multirun.yaml", "report.html", "sweep.csv"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert '<a href="0/report.html">' in (folder / "report.html").read_text()
    recorded = read_runs(folder)
    ids = [OmegaConf.load(folder / str(job) / "config.yaml").runtime.run_id for job in range(2)]
    assert [run["run_id"] for run in recorded] == ids
    assert [name.rpartition("-")[0] for name in ids] == ["sweep-0", "sweep-1"]
    assert {run["run_group"] for run in recorded} == {"sweep"}


def test_sweep_stops_if_no_job_can_start(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that only its own options keep from starting does not stop the sweep."""
    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    arguments = ["-m", *small, *MLP, "logger=none", "seed=0,1"]
    _, err = run_here(*arguments, "+optimizer.lrr=1", f"hydra.sweep.dir={tmp_path}/one", code=1)
    assert error_line(err).startswith("error: no job can start: optimizer.lrr: torch.optim.SGD has no option `lrr`")
    for function, *options in at_exit:
        function(*options)
    assert "1 jobs in" in capsys.readouterr().out
    _, err = run_here(*arguments, "ckpt_path=nowhere,no", f"hydra.sweep.dir={tmp_path}/all", code=1)
    assert err.count("there is no such file") == 4


def test_another_metric_is_that_of_the_finished_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No job is started again: the second sweep would have no function to start one."""
    sweep = tmp_path / "sweep"
    monkeypatch.setattr(
        "onecurve.extras.sweeps.job.launch", lambda *_: Result({"val/acc": 0.5, "val/loss": 2.0}, tmp_path)
    )
    run_here("-m", "seed=0,1", f"hydra.sweep.dir={sweep}")
    assert [row["val/acc"] for row in rows(sweep / "sweep.csv")] == ["0.5"] * 2
    monkeypatch.setattr("onecurve.extras.sweeps.job.launch", None)
    run_here(f"sweep={sweep}", "optimized_metric=val/loss")
    assert list(rows(sweep / "sweep.csv")[0])[2] == "val/loss"
    assert [row["val/loss"] for row in rows(sweep / "sweep.csv")] == ["2.0"] * 2


@pytest.mark.slow
def test_stopped_sweep_resumes(small: list[str], tmp_path: Path) -> None:
    """Stopped by Ctrl-C in its second job; that one goes on from its checkpoint, and a third is added."""
    folder = tmp_path / "a sweep"
    slowly = [slow(0.05), "trainer.max_epochs=3"]
    arguments = [*small, *MLP, *slowly, "logger=none", "callbacks.checkpoint.every_n_train_steps=1"]
    process = start("-m", *arguments, "seed=0,1", f"hydra.sweep.dir='{folder}'")
    metrics = folder / "1" / "metrics.csv"
    wait_for_rows(folder / "1", 8, process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, err
    assert "goes on with the sweep" in err
    assert [row["status"] for row in rows(folder / "sweep.csv")] == ["finished", "stopped"]
    assert json.loads((folder / "1" / "job.json").read_text())["status"] == "stopped"
    before, first = rows(metrics)[:6], (folder / "0" / "job.json").stat().st_mtime_ns

    out, _ = run(f"sweep='{folder}'", "seed=2,1,0")
    assert "job 0 has finished before" in out
    assert (folder / "0" / "job.json").stat().st_mtime_ns == first
    speed = "throughput/samples_per_sec"
    assert [row.get(speed) for row in rows(metrics)][: len(before)] == [row.get(speed) for row in before]
    assert [int(row["step"]) for row in rows(metrics) if row["train/loss"]] == list(range(33))
    table = rows(folder / "sweep.csv")
    assert {row["overrides"]: row["status"] for row in table} == {f"seed={seed}": "finished" for seed in range(3)}
    results = [float(row["val/acc"]) for row in table]
    (over_seeds,) = rows(folder / "seeds.csv")
    assert over_seeds["seeds"] == "3"
    assert float(over_seeds["val/acc mean"]) == pytest.approx(statistics.mean(results))
    assert float(over_seeds["val/acc std"]) == pytest.approx(statistics.stdev(results))
    assert "std" in out


def test_interrupt_after_the_last_step_of_a_job_stops_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*_: Any) -> Result:
        with signals.forward_to_workers():
            os.kill(os.getpid(), signal.SIGINT)
        return Result({"val/acc": 0.5}, tmp_path)

    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    monkeypatch.setattr(signals, "_received", [])
    monkeypatch.setattr("onecurve.extras.sweeps.job.launch", launch)
    handlers = {number: signal.getsignal(number) for number in signals.SIGNALS}
    try:
        _, err = run_here("-m", "seed=0,1", f"hydra.sweep.dir={tmp_path}/sweep", code=128 + signal.SIGINT)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert f"sweep={tmp_path}/sweep goes on with the sweep" in err
    assert json.loads((tmp_path / "sweep" / "0" / "job.json").read_text())["status"] == "finished"
    assert not (tmp_path / "sweep" / "1").exists()
    for function, config in at_exit:
        function(config)
    assert [row["status"] for row in rows(tmp_path / "sweep" / "sweep.csv")] == ["finished"]
    assert (tmp_path / "sweep" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [JOBLIB, ["hydra/launcher=submitit_local"]],
    ids=["joblib", "submitit"],
)
def test_parallel_jobs_have_their_own_cores(launcher: list[str], small: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    several = ["-m", "trainer.devices=2", "strategy=ddp,pipeline", "trainer.sync_batchnorm=false"]
    run(*several, *small, *MLP, REPORT, "logger=none", *launcher, f"hydra.sweep.dir={folder}")
    assert [row["status"] for row in rows(folder / "sweep.csv")] == ["finished"] * 2
    jobs = [reports_of(folder / number)[0] for number in ("0", "1")]
    assert all(len(job["cores"]) == min(2, len(os.sched_getaffinity(0))) for job in jobs)
    (began, ended), (also_began, also_ended) = (job["span"] for job in jobs)
    apart = ended < also_began or also_ended < began
    assert apart or not jobs[0]["cores"] & jobs[1]["cores"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_joblib_processes_end_with_the_sweep(number: signal.Signals, small: list[str], tmp_path: Path) -> None:
    endless = ["-m", *small, *MLP, "logger=none", "trainer.max_epochs=10000", "seed=0,1", *JOBLIB]
    process = start(*endless, f"hydra.sweep.dir={tmp_path}/sweep")
    assert wait_until(lambda: bool(list(tmp_path.glob("sweep/*/metrics.csv"))), 120)
    process.send_signal(number)
    process.communicate(timeout=30)  # the pipes close with the last process
    assert process.returncode == -number


@pytest.mark.slow
def test_stopped_optuna_sweep_resumes(small: list[str], tmp_path: Path) -> None:
    """The interrupted trial resumes with its values; a seeded sampler proposes no point twice."""
    folder, lr = tmp_path / "study", "optimizer.lr=tag(log, interval(0.001,0.1))"
    slowly = [slow(0.05), "trainer.max_epochs=2"]
    optuna = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "+hydra.sweeper.sampler.seed=0"]
    process = start(*optuna, *small, *MLP, *slowly, lr, REPORT, "logger=none", f"hydra.sweep.dir={folder}")
    wait_for_rows(folder / "1", 1, process)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    chosen = json.loads((folder / "1" / "job.json").read_text())["overrides"]

    out, _ = run(f"sweep={folder}", "hydra.sweeper.n_trials=3")
    table = rows(folder / "sweep.csv")
    assert [row["status"] for row in table] == ["finished"] * 3
    assert json.loads((folder / "1" / "job.json").read_text())["overrides"] == chosen
    rates = [reports_of(folder / str(trial))[0]["values"]["lr"] for trial in range(3)]
    assert len(set(rates)) == 3
    assert all(0.001 <= rate <= 0.1 for rate in rates)
    best = max(table, key=lambda row: float(row["val/acc"]))
    assert f"best: trial {best['job']} with {float(best['val/acc']):.4f}" in out


@pytest.mark.slow
def test_pruned_trial_stops_on_all_ranks(small: list[str], tmp_path: Path) -> None:
    """The pruner rejects every accuracy; both ranks have the same value, and both stop."""
    folder = tmp_path / "study"
    optuna = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "optimizer.lr=interval(0.01,1)", *TWO]
    pruner = "callbacks.pruning.pruner"
    threshold = [
        f"{pruner}._target_=optuna.pruners.ThresholdPruner",
        f"+{pruner}.lower=2",
        f"{pruner}.n_warmup_steps=1",
    ]
    pruning = ["callbacks=[default,pruning]", *threshold, f"~{pruner}.n_startup_trials"]
    long = ["trainer.max_epochs=500"]
    run(*optuna, *small, *MLP, *long, *pruning, REPORT, "logger=none", f"hydra.sweep.dir={folder}")
    (row,) = rows(folder / "sweep.csv")
    assert row["status"] == "pruned"
    assert len(reports_of(folder / "0")) == 2
    epochs = [int(line["epoch"]) for line in rows(folder / "0" / "metrics.csv") if line["train/loss"]]
    assert set(epochs) == {0, 1}


@pytest.mark.slow
def test_wandb_agent_starts_jobs(small: list[str], tmp_path: Path) -> None:
    """The command of the YAML, filled in by wandb's own functions, reaches both ranks of the agent's run."""
    sweep = yaml.safe_load((ROOT / "scripts" / "wandb_sweep.yaml").read_text())
    values = {"optimizer.lr": {"value": sweep["parameters"]["optimizer.lr"]["min"]}, "model.width": {"value": 16}}
    macros = create_sweep_command_args({"args": values}) | {"program": [sweep["program"]], "env": ["/usr/bin/env"]}
    macros["interpreter"] = [sys.executable]
    words: list[str] = []
    for word in create_sweep_command(sweep["command"]):
        words += macros[word[2:-1]] if word.startswith("${") else [word]
    little = ["data.batch_size=32", "trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.accelerator=cpu"]
    agent = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": "r1", "WANDB_MODE": "offline"}
    command = [*words, *small, *little, *TWO, REPORT, f"hydra.run.dir={tmp_path}/run"]
    subprocess.run(command, cwd=ROOT, env=os.environ | agent, check=True, timeout=200)
    assert [rank["values"]["lr"] for rank in reports_of(tmp_path / "run")] == [0.01] * 2
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").runtime.run_id == "r1"
    (recorded,) = read_runs(tmp_path)
    assert (recorded["run_id"], recorded["sweep_id"]) == ("r1", "s1")


@pytest.mark.slow
def test_refuses_a_sweep_under_torchrun(tmp_path: Path) -> None:
    _, err = run("-m", "seed=0,1", f"hydra.sweep.dir={tmp_path}/sweep", program=TORCHRUN, code=1)
    assert err.count("error: -m: a sweep starts the processes of its jobs") == 1
    assert not (tmp_path / "sweep").exists()
