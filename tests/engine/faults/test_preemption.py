"""After Ctrl-C, SIGTERM or SIGUSR1 to any process all ranks save and stop together, and the run resumes exactly."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from onecurve.config.folder import saved_config
from onecurve.process import signals
from onecurve.records.events import read_events
from tests.support.commands import (
    PARITY,
    TORCHRUN,
    TRAIN,
    TWO,
    callback,
    count_lines,
    free_port,
    ranks,
    run,
    slow,
    slurm_task,
    start,
    steps,
    wait_for_exit,
    wait_for_rows,
)
from tests.support.comparison import check_last_checkpoints
from tests.support.pool import Pool
from tests.support.runs import compose, fit

SPAWN = ["strategy=ddp_spawn", "trainer.devices=2"]


@pytest.fixture(scope="module")
def uninterrupted(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    fit(compose(folder, *small, *PARITY))
    return folder


SLOW_ROWS = {
    "alone": (signal.SIGTERM, "the process", TRAIN, []),
    "interrupted launcher": (signal.SIGINT, "the process", TRAIN, TWO),
    "Ctrl-C": (signal.SIGINT, "all of them", TRAIN, TWO),
    "Ctrl-C spawned": (signal.SIGINT, "all of them", TRAIN, SPAWN),
    "Ctrl-C torchrun": (signal.SIGINT, "all of them", TORCHRUN, TWO),
    "launcher": (signal.SIGUSR1, "the process", TRAIN, TWO),
    "all processes": (signal.SIGTERM, "all of them", TRAIN, TWO),  # as SLURM does
    "spawned": (signal.SIGTERM, "all of them", TRAIN, SPAWN),
    "torchrun": (signal.SIGUSR1, "a rank", TORCHRUN, TWO),
}


@pytest.mark.parametrize(
    ("number", "to", "program", "world"),
    [
        pytest.param(signal.SIGTERM, "a rank", TRAIN, TWO, id="one rank"),  # which must tell the others
        *(pytest.param(*row, id=name, marks=pytest.mark.slow) for name, row in SLOW_ROWS.items()),
    ],
)
def test_signal_saves_stops_and_resumes(
    number: signal.Signals,
    to: str,
    program: tuple[str, ...],
    world: list[str],
    uninterrupted: Path,
    pool: Pool,
    small: list[str],
    folder: Path,
) -> None:
    process = start(*small, *PARITY, *world, callback("WaitForSignal", at=8), f"run_dir={folder}", program=program)
    wait_for_rows(folder, 4, process)
    if to == "all of them":
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid if to == "the process" else ranks(process.pid)[-1], number)
    code, out, err = wait_for_exit(process)
    assert code == (1 if program == TORCHRUN else 128 + number), err[-3000:]  # torchrun sets its own exit codes
    assert out.count(f"stopped by {number.name} at step") == 1
    assert "Traceback" not in err or program == TORCHRUN
    saved = torch.load(folder / "checkpoints" / "last.ckpt")["global_step"]
    assert 4 <= saved < 20  # ranks look for signals about once a second
    last = read_events(folder)[-1]
    assert (last["event"], last["step"], last["reason"]) == ("stopped", saved, number.name)
    assert count_lines(folder) == 1 + saved, "the row of the last step is there"
    cfg = compose(folder, *small, *PARITY, f"ckpt_path={folder}/checkpoints/last.ckpt", *(TWO if not world else []))
    pool.run(2, fit, cfg) if not world else fit(cfg)
    check_last_checkpoints(folder, uninterrupted)
    assert steps(folder) == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("world", [[], TWO])
def test_a_run_goes_on_without_a_reader_of_its_output(world: list[str], small: list[str], folder: Path) -> None:
    """As with `| head -1`."""
    options = ["trainer.enable_progress_bar=true", "trainer.max_steps=12", f"run_dir={folder}"]
    process = start(*small, *PARITY, *world, slow(0.1), *options)
    assert process.stdout
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    code, _, err = wait_for_exit(process)
    assert (code, err.count("Traceback")) == (0, 0)
    assert read_events(folder)[-1]["event"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("world", [[], TWO])
def test_an_interrupt_also_ends_the_reader_of_the_output(world: list[str], small: list[str], folder: Path) -> None:
    """As with `| tee log`: the progress bar and the logs find a pipe that nobody reads."""
    options = [*world, callback("WaitForSignal", at=8), "trainer.enable_progress_bar=true", f"run_dir={folder}"]
    process = start(*small, *PARITY, *options)
    wait_for_rows(folder, 4, process)
    assert process.stdout
    process.stdout.close()
    process.stdout = None
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = wait_for_exit(process, timeout=25)
    assert code == 128 + signal.SIGINT
    assert "Traceback" not in err
    assert read_events(folder)[-1]["event"] == "stopped"
    assert (folder / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "pause"), [(signal.SIGTERM, 3.0), (signal.SIGINT, 0.6)])
def test_second_signal_ends_the_run_at_once(
    number: signal.Signals, pause: float, small: list[str], folder: Path
) -> None:
    """A sleeping rank does not react to the first one."""
    process = start(*small, *PARITY, *TWO, slow(0.0), "+callbacks.slow.at=3", f"run_dir={folder}")
    wait_for_rows(folder, 3, process)
    os.kill(process.pid, number)
    time.sleep(pause)
    assert process.poll() is None
    before = time.monotonic()
    os.kill(process.pid, number)
    code, _, err = wait_for_exit(process)
    assert code == 128 + number
    assert time.monotonic() - before < 50
    assert f"stopped by {number.name}; {folder} has no checkpoint yet" in err


@pytest.mark.slow
def test_requeued_job_resumes(small: list[str], uninterrupted: Path, folder: Path) -> None:
    """The same command twice, as SLURM runs it, continues one wandb run."""
    command = [*small, *(word for word in PARITY if word != "logger=none"), "resume=auto", f"run_dir={folder}"]
    process = start(*command, *TWO, callback("WaitForSignal", at=8), WANDB_MODE="offline")
    wait_for_rows(folder, 4, process)
    os.kill(process.pid, signal.SIGUSR1)
    assert wait_for_exit(process)[0] == 128 + signal.SIGUSR1
    run(*command, WANDB_MODE="offline")
    check_last_checkpoints(folder, uninterrupted)
    runs = {file.name.partition("run-")[2] for file in (folder / "wandb").glob("offline-run-*/*.wandb")}
    assert runs == {f"{saved_config(folder).runtime.run_id}.wandb"}


@pytest.mark.slow
def test_signals_to_tasks_of_a_slurm_job(small: list[str], uninterrupted: Path, folder: Path) -> None:
    """All tasks get the signal at once. Lightning's own requeueing, which saves in its handler, is disabled."""
    port = free_port()
    command = [*small, *PARITY, *TWO, slow(0.1), f"run_dir={folder}", "resume=auto"]
    tasks = [start(*command, **slurm_task(rank, port)) for rank in (0, 1)]
    wait_for_rows(folder, 4, tasks[0])
    for process in tasks:
        os.kill(process.pid, signal.SIGUSR1)
    ended = [wait_for_exit(process) for process in tasks]
    assert [code for code, _, _ in ended] == [128 + signal.SIGUSR1] * 2, ended
    tasks = [start(*command, **slurm_task(rank, port)) for rank in (0, 1)]
    assert [wait_for_exit(process)[0] for process in tasks] == [0, 0]
    check_last_checkpoints(folder, uninterrupted)


def test_restores_signal_handlers(small: list[str], folder: Path) -> None:
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    fit(compose(folder, *small, *PARITY, "trainer.max_steps=2"))
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before
