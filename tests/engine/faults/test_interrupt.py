"""Ctrl-C: the first one saves and stops a run, the second one ends it. test_preemption.py has several processes."""

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from onecurve.errors import UserError
from onecurve.observe import wandb
from onecurve.process import signals
from onecurve.run import experiment
from tests.support.commands import PARITY, TWO, ranks, start, wait_for_exit, wait_until
from tests.support.runs import compose, fit


class Interrupt(L.Callback):
    """Send this process SIGINT at the third step."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_saves_and_stops(
    small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A single process without a launcher; the tests with several processes are slow."""
    monkeypatch.setattr(signals, "_received", [])
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(signals.Stopped) as stopped:
            fit(compose(folder, *small, *PARITY), Interrupt())
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.value.code == 128 + signal.SIGINT
    assert 3 <= torch.load(folder / "checkpoints" / "last.ckpt")["global_step"] < 20
    assert "Ctrl-C again stops at once" in capfd.readouterr().err


@pytest.mark.slow
def test_interrupt_while_the_ranks_start(small: list[str], folder: Path) -> None:
    process = start(*small, *PARITY, *TWO, f"run_dir={folder}")
    assert wait_until(lambda: len(ranks(process.pid)) == 2, 60)
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = wait_for_exit(process)
    assert code == 128 + signal.SIGINT
    assert f"stopped by SIGINT; {folder} has no checkpoint yet" in err


class InterruptWorkers(L.Callback):
    """Send the workers of the DataLoader each signal twice, from another process as schedulers do."""

    def __init__(self) -> None:
        self.others = set(multiprocessing.active_children())

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            workers = set(multiprocessing.active_children()) - self.others
            assert workers
            for number in (*signals.SIGNALS, *signals.SIGNALS):
                send(number, *workers)
                time.sleep(0.15)


def send(number: int, *processes: Any) -> None:
    subprocess.run(["kill", f"-{number}", *(str(process.pid) for process in processes)], check=True)


def test_data_workers_outlive_stop_requests(small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_INTERRUPT_WINDOW", 0.1)
    monkeypatch.setattr(signals, "_DUPLICATE_WINDOW", 0.1)
    words = ["data.num_workers=1", "data.device_resident=false", "trainer.limit_val_batches=0"]
    assert len(fit(compose(folder, *small, *PARITY, *words), InterruptWorkers()).losses) == 20


def _hang(is_ready: Any) -> None:
    signals.outlive_requests()
    is_ready.set()
    time.sleep(60)


def test_rank_ends_a_data_worker_that_hangs() -> None:
    is_ready = multiprocessing.Event()
    worker = multiprocessing.Process(target=_hang, args=[is_ready], daemon=True)
    worker.start()
    assert is_ready.wait(100)
    send(signal.SIGTERM, worker)
    worker.join(0.3)
    assert worker.is_alive()
    worker.terminate()
    worker.join(100)
    assert worker.exitcode == 0


@pytest.mark.parametrize(
    ("number", "pause", "is_second"),
    [
        (signal.SIGINT, 0.1, False),
        (signal.SIGINT, 0.5, True),
        (signal.SIGTERM, 0.5, False),
        (signal.SIGTERM, 3.0, True),
    ],
)
def test_late_copies_are_no_second_request(
    number: signal.Signals, pause: float, is_second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_received", [(number, 100 - pause)])
    monkeypatch.setattr(signals.time, "monotonic", lambda: 100.0)
    assert signals.record_signal(number) == is_second


def test_a_request_is_recorded_though_nobody_reads_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C has ended `tee`, too."""

    def fail(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(signals, "_received", [])
    monkeypatch.setattr(signals.os, "write", fail)
    assert signals.record_signal(signal.SIGINT) is False
    assert signals.requested() == signal.SIGINT


@pytest.mark.parametrize(("number", "is_preempted"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_wandb_repeats_no_run_that_the_user_has_stopped(
    number: signal.Signals, is_preempted: bool, small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise signals.Stopped(number)

    marked: list[bool] = []
    monkeypatch.setattr(experiment.Trainer, "fit", stop)
    monkeypatch.setattr(wandb, "_call_wandb", lambda name, **_: marked.append(name == "mark_preempting"))
    with pytest.raises(signals.Stopped):
        experiment.run_experiment(compose(folder, *small, *PARITY))
    assert any(marked) == is_preempted


def returns_nothing(cfg: Any) -> None:
    """Stand for a `run` of train.py without its last line."""


def test_a_run_without_a_trainer_is_no_success_in_wandb(
    small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Any] = []
    monkeypatch.setattr(wandb, "_call_wandb", lambda name, **options: ends.append((name, options)))
    with pytest.raises(UserError, match="returns no trainer: let it end with `return trainer`"):
        experiment.run_experiment(compose(folder, *small, *PARITY, f"launch.function={__name__}.returns_nothing"))
    assert ends == [("finish", {"exit_code": 1})]
