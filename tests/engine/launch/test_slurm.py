"""Jobs of a real SLURM on two nodes stop, are queued again, and finish like uninterrupted ones."""

import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onecurve.records.events import read_events
from tests.support.commands import ROOT, run_here, slow
from tests.support.comparison import TOLERANCE, relative
from tests.support.runs import compose, fit
from tests.support.slurm import Slurm, skip_reason

REASON = skip_reason()
needs_slurm = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TASK = ["experiment=parity", "trainer.accelerator=cpu", "trainer.num_nodes=2", "trainer.devices=1"]
QUIET = ["logger=none", "trainer.enable_progress_bar=false", "test=false"]
SLOW = slow(0.5)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path)
    try:
        cluster.set_up()
        yield cluster
    finally:
        cluster.tear_down()


def submit(slurm: Slurm, *words: str) -> tuple[str, Path]:
    """Submit a job; return its number and its run folder."""
    command = [sys.executable, "-m", "scripts.submit", "--time=10", *words]
    result = subprocess.run(command, cwd=ROOT, env=slurm.environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    folder, answer = result.stdout.splitlines()
    return answer.split()[-1], Path(folder)


def rows(folder: Path) -> list[int]:
    """Return the steps in metrics.csv so far."""
    file = folder / "metrics.csv"
    lines = file.read_text().splitlines()[1:] if file.is_file() else []
    return [int(line.split(",")[0]) for line in lines]


@needs_slurm
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "best"])
def test_job_on_two_nodes_stops_and_resumes(strategy: str, slurm: Slurm, small: list[str], tmp_path: Path) -> None:
    reference = fit(compose(tmp_path / "single", *small, "experiment=parity"))
    job, folder = submit(slurm, *TASK, *QUIET, *small, f"strategy={strategy}", SLOW)
    try:
        slurm.wait_until(lambda: len(rows(folder)) >= 5, 240, "fifth step")
        slurm.run("scancel", "--signal=USR1", job)
        slurm.wait_until(lambda: slurm.job_state(job) != "RUNNING", 60, "end of the first part")
        assert len(rows(folder)) < 20
        slurm.wait_until(lambda: slurm.job_state(job) in ("COMPLETED", "FAILED"), 120, "end of the job")
        assert slurm.job_state(job) == "COMPLETED", (folder / "slurm.out").read_text()
        assert rows(folder) == list(range(20))
        found = torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"]
        assert max(relative(found[name], tensor) for name, tensor in reference.final.items()) < TOLERANCE
    finally:
        print((folder / "slurm.out").read_text() if (folder / "slurm.out").is_file() else "no output")
        subprocess.run(["rm", "-r", str(folder)])


@needs_slurm
@pytest.mark.slow
def test_elastic_job_continues_on_fewer_nodes(slurm: Slurm, small: list[str], tmp_path: Path) -> None:
    reference = fit(compose(tmp_path / "single", *small, "experiment=parity"))
    job, folder = submit(slurm, *TASK, *QUIET, *small, "strategy=ddp", "launch.elastic=true", SLOW)
    try:
        slurm.wait_until(lambda: len(rows(folder)) >= 5, 240, "fifth step")
        slurm.run("scontrol", "requeuehold", job)
        slurm.wait_until(lambda: slurm.job_state(job) == "PENDING", 60, "end of the first part")
        assert len(rows(folder)) < 20
        slurm.run("scontrol", "update", f"JobId={job}", "NumNodes=1", "NumTasks=1")
        slurm.run("scontrol", "release", job)
        slurm.wait_until(lambda: slurm.job_state(job) in ("COMPLETED", "FAILED"), 240, "end of the job")
        assert slurm.job_state(job) == "COMPLETED", (folder / "slurm.out").read_text()
        assert rows(folder) == list(range(20))
        events = read_events(folder)
        assert [event["world_size"] for event in events if event["event"] in ("start", "resume")] == [2, 1]
        found = torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"]
        assert max(relative(found[name], tensor) for name, tensor in reference.final.items()) < TOLERANCE
    finally:
        print((folder / "slurm.out").read_text() if (folder / "slurm.out").is_file() else "no output")
        subprocess.run(["rm", "-r", str(folder)])


def test_batch_script_follows_the_configuration() -> None:
    words = [
        "strategy=fsdp",
        "trainer.num_nodes=2",
        "trainer.devices=4",
        "optimizer.lr=0.1",
        "--option=--partition=gpu",
    ]
    command = ["--dry-run", "--time=4:00:00", "--save-before=60", "--cpus-per-device=8"]
    text, _ = run_here(*command, *words, program="scripts.submit")
    for line in ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=4:00:00", "--signal=USR1@60"):
        assert f"#SBATCH {line}\n" in text
    assert "#SBATCH --partition=gpu\n" in text
    assert "#SBATCH --cpus-per-task=8\n" in text
    assert "\nsrun --cpus-per-task=8 " in text, "srun does not take it from the job"
    assert "strategy=fsdp trainer.num_nodes=2 trainer.devices=4 optimizer.lr=0.1 run_dir=/" in text
    text, _ = run_here(*command, "strategy=dp", "trainer.devices=4", program="scripts.submit")
    assert "#SBATCH --cpus-per-task=32\n" in text
    text, _ = run_here(*command, "run_dir=/my/run", "trainer.devices=1", program="scripts.submit")
    assert "train.py trainer.devices=1 run_dir=/my/run resume=auto\n" in text
    assert "#SBATCH --output=/my/run/slurm.out\n" in text
    _, err = run_here(*command, "ckpt_path=/my/run", program="scripts.submit", code=1)
    assert err == "error: ckpt_path=/my/run: give run_dir=RUN_DIR and the options of that run, which goes on\n"
    _, err = run_here(*command, "model=resnet8", program="scripts.submit", code=1)
    assert err.startswith("error: model=resnet8: did you mean resnet")
    _, err = run_here(*command, "strategy=fsdp", program="scripts.submit", code=1)
    assert err == "error: trainer.devices=auto: a job asks for a number of devices per node; give one\n"


@needs_slurm
@pytest.mark.slow
def test_sweep_of_jobs_on_two_nodes(slurm: Slurm, small: list[str], tmp_path: Path) -> None:
    """Hydra's launcher submits each job, and srun starts its ranks."""
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=1"]
    limits = ["hydra.launcher.timeout_min=10", "hydra.launcher.cpus_per_task=1", f"hydra.sweep.dir={tmp_path}/sweep"]
    words = [*TASK, *QUIET, *small, "strategy=ddp", "optimizer.lr=0.05,0.1,many"]
    command = [sys.executable, str(ROOT / "train.py"), "-m", *launcher, *limits, *words]
    result = subprocess.run(command, env=slurm.environment, cwd=ROOT, capture_output=True, text=True)
    rows = list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == ["finished", "finished", "failed"], result.stdout + result.stderr
    assert "optimizer.lr=many" in rows[2]["error"], "a job that fails on all its ranks leaves the others alone"
    assert len({row["val/acc"] for row in rows}) == 3
    again = [word.removesuffix(",many") for word in command]
    # No rank of a finished job waits for rank zero, which would take ten minutes.
    result = subprocess.run(again, env=slurm.environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in result.stderr
    logs = [file.read_text() for file in (tmp_path / "sweep" / ".submitit").glob("*/*_0_log.out")]
    assert sum("has finished before" in log for log in logs) == 2
    reference = fit(compose(tmp_path / "single", *small, "experiment=parity", "optimizer.lr=0.05"))
    (job,) = [row["job"] for row in rows if "0.05" in row["overrides"]]
    found = torch.load(tmp_path / "sweep" / job / "checkpoints" / "last.ckpt")["state_dict"]
    assert max(relative(found[name], tensor) for name, tensor in reference.final.items()) < TOLERANCE
