"""Elastic runs lose ranks, devices, hosts and nodes at random, and get them back: they end like the undisturbed run.

There are five trials with the project's own launcher, or ELASTIC_TRIALS, as many with `bit_exact=true`, and a quarter
of them in each other place.
"""

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.bits import EXACT, rows_of
from tests.support.commands import (
    PARITY,
    ROOT,
    TRAIN,
    count_lines,
    kill_group,
    ranks,
    slow,
    start,
    wait_for_exit,
    wait_until,
)
from tests.support.comparison import TOLERANCE, check_last_checkpoints, check_same_rows
from tests.support.hosts import Hosts
from tests.support.hosts import skip_reason as no_hosts
from tests.support.runs import Record, compose, fit
from tests.support.slurm import Slurm
from tests.support.slurm import skip_reason as no_slurm

TRIALS = int(os.environ.get("ELASTIC_TRIALS", 5))
TASK = [*PARITY, "callbacks.checkpoint.every_n_train_steps=2", "test=false"]


class ElasticRun:
    """An elastic run in one place, to which faults happen.

    Args:
        folder: an empty folder for its files.
        number: the seed of the faults, which also chooses the strategy.
        small: overrides that choose the data.
    """

    options: ClassVar[list[str]] = []  # of the experiment
    strategies: ClassVar[list[tuple[str, int]]]  # with the number of devices, on each host if there are several

    def __init__(self, folder: Path, number: int, small: list[str]) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.rng = random.Random(number)
        strategy, self.devices = self.strategies[number % len(self.strategies)]
        self.words = [
            *small,
            *TASK,
            *self.options,
            f"strategy={strategy}",
            f"trainer.devices={self.devices}",
            slow(0.4),
        ]
        self.words += ["launch.elastic=true"]
        self.resumable = ["resume=auto", f"run_dir={self.run_dir}"]
        print(f"{strategy} x {self.devices}")

    def suffer(self) -> None:
        """Wait for a moment of start, training, validation or saving, and let a fault happen."""
        if self.has_ended():
            self.start_again()
        if self.rng.random() < 0.6:  # else a fault often hits a start
            rows = count_lines(self.run_dir)
            wait_until(lambda: count_lines(self.run_dir) != rows or self.has_ended(), 90)
            time.sleep(self.rng.uniform(0, 3))
        else:
            time.sleep(self.rng.uniform(0, 15))
        fault = self.rng.choice(self.faults())
        print(f"{fault} after {count_lines(self.run_dir)} lines of {len(self.all_ranks())} ranks")
        getattr(self, fault)()

    def faults(self) -> list[str]:
        """Return the names of the methods that can happen now, those that should happen more often twice."""
        raise NotImplementedError

    def all_ranks(self) -> list[int]:
        raise NotImplementedError

    def has_ended(self) -> bool:
        raise NotImplementedError

    def kill_a_rank(self) -> None:
        if victims := self.all_ranks():
            kill(self.rng.choice(victims))

    def start_again(self) -> bool:
        """Start a run that has ended where a user has to; return False if it has finished. Fail for another end."""
        raise NotImplementedError

    def finish(self) -> None:
        while True:
            assert wait_until(self.has_ended, 400), "the run has not ended"
            if not self.start_again():
                return

    def close(self) -> None:
        """End what is left after an error."""


class LocalRun(ElasticRun):
    """A run of the project's own launcher. Its devices are files: one is unusable while `lost.INDEX` exists."""

    strategies: ClassVar = [
        ("ddp", 3),
        ("hybrid", 4),
        ("fsdp", 3),
        ("auto", 2),
        ("hsdp", 4),
        ("pipeline", 2),
        ("ddp_spawn", 2),
    ]

    def __init__(self, folder: Path, number: int, small: list[str]) -> None:
        super().__init__(folder, number, small)
        self.words += [*self.resumable, "launch.max_restarts=9", f"launch.probe='test ! -e {folder}/lost.$DEVICE'"]
        self.start()

    def start(self) -> None:
        self.process = start(*self.words, ELASTIC_PAUSE="1")

    def all_ranks(self) -> list[int]:
        """Return the ranks, and those that they have started, as under `ddp_spawn`."""
        return [pid for rank in ranks(self.process.pid) for pid in (rank, *ranks(rank))]

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def faults(self) -> list[str]:
        return [*2 * ["kill_a_rank"], "kill_the_launcher", *2 * ["take_a_device"], "give_devices_back"]

    def kill_the_launcher(self) -> None:
        if not self.has_ended():
            kill(self.process.pid)
            wait_for_exit(self.process)
            assert not kill_group(self.process.pid), "processes left running"
            self.start()

    def take_a_device(self) -> None:
        (self.folder / f"lost.{self.rng.randrange(self.devices)}").touch()
        self.kill_a_rank()

    def give_devices_back(self) -> None:
        for file in self.folder.glob("lost.*"):
            file.unlink()

    def start_again(self) -> bool:
        code, _, err = wait_for_exit(self.process)
        if code:
            assert "devices are left, too few for" in err, err[-3000:]
            self.give_devices_back()
            self.start()
        return code != 0

    def finish(self) -> None:
        self.give_devices_back()
        super().finish()

    def close(self) -> None:
        kill_group(self.process.pid)


class TorchrunRun(ElasticRun):
    """A run on one or two hosts. The first one must stay, because torchrun's rendezvous is there."""

    strategies: ClassVar = [("ddp", 1), ("hybrid", 2), ("fsdp", 1), ("hsdp", 2), ("auto", 1)]

    def __init__(self, folder: Path, number: int, small: list[str]) -> None:
        super().__init__(folder, number, small)
        self.hosts = Hosts(folder)
        meeting = [f"--rdzv-endpoint={self.hosts.addresses[0]}:29400", "--rdzv-conf=last_call_timeout=2"]
        program = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", sys.executable, "-m", "torch.distributed.run"]
        self.command = [*program, "--nnodes=1:2", "--rdzv-backend=c10d", *meeting]
        self.command += [f"--nproc-per-node={self.devices}", "--max-restarts=100", *TRAIN, *self.words, *self.resumable]
        self.started: list[subprocess.Popen[bytes]] = []
        self.hosts.set_up()
        self.agents = [self.start(host) for host in (0, 1)]

    def start(self, host: int) -> "subprocess.Popen[bytes]":
        log = self.folder / f"{len(self.started)}.log"
        self.started.append(self.hosts.start(host, self.command, log, ROOT))
        return self.started[-1]

    def all_ranks(self) -> list[int]:
        return [rank for agent in self.agents for rank in ranks(agent.pid)]

    def has_ended(self) -> bool:
        return self.agents[0].poll() is not None

    def faults(self) -> list[str]:
        if self.agents[1].poll() is None:
            return [*2 * ["kill_a_rank"], "kill_an_agent", "send_a_host_away", "cut_the_cable"]
        return [*2 * ["start_a_host"], "kill_a_rank"]

    def kill_an_agent(self) -> None:
        kill(self.agents[1].pid)

    def send_a_host_away(self) -> None:
        self.agents[1].terminate()

    def cut_the_cable(self) -> None:
        self.hosts.link("down")
        time.sleep(self.rng.uniform(1, 8))
        self.hosts.link("up")

    def start_a_host(self) -> None:
        self.agents[1] = self.start(1)

    def start_again(self) -> bool:
        assert self.agents[0].wait() == 0
        return False

    def finish(self) -> None:
        super().finish()
        self.agents[1].terminate()  # it may wait for the first host
        self.agents[1].wait(60)

    def close(self) -> None:
        for pid in [*self.all_ranks(), *(process.pid for process in self.started if process.poll() is None)]:
            kill(pid)
        self.hosts.tear_down()
        for log in sorted(self.folder.glob("*.log")):
            print(f"{log.name}\n{log.read_text()[-5000:]}")


class SlurmRun(ElasticRun):
    """A job on one or two nodes of a real SLURM."""

    strategies: ClassVar = [("ddp", 1), ("hsdp", 2), ("fsdp", 1), ("hybrid", 2), ("auto", 1)]

    def __init__(self, folder: Path, number: int, small: list[str]) -> None:
        super().__init__(folder, number, small)
        self.slurm = Slurm(folder)
        self.slurm.set_up()
        command = [sys.executable, "-m", "scripts.submit", "--time=10", "--option=--nodes=1-2", *self.words]
        result = subprocess.run(command, cwd=ROOT, env=self.slurm.environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        place, answer = result.stdout.splitlines()
        self.run_dir, self.job, self.kills = Path(place), answer.split()[-1], 0

    def all_ranks(self) -> list[int]:
        found = subprocess.run(["pgrep", "-f", f"^{sys.executable} .*{self.run_dir}"], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def has_ended(self) -> bool:
        return self.slurm.job_state(self.job) in ("COMPLETED", "FAILED")

    def faults(self) -> list[str]:
        state = self.slurm.run("sinfo", "--nodes=node2", "--noheader", "--format=%t").strip()
        changes = ["drain_a_node", "lose_a_node"] if state in ("idle", "mix", "alloc") else 2 * ["return_the_node"]
        return [*2 * ["kill_a_rank"], "signal_the_job", *changes]

    def control(self, *words: str) -> None:
        """Change the cluster or the job, unless it has just ended."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.slurm.run("scontrol", *words)

    def signal_the_job(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.slurm.run("scancel", "--signal=USR1", self.job)

    def drain_a_node(self) -> None:
        self.control("update", "NodeName=node2", "State=DRAIN", "Reason=test")
        self.control("requeue", self.job)

    def lose_a_node(self) -> None:
        self.control("update", "NodeName=node2", "State=DOWN", "Reason=test")

    def return_the_node(self) -> None:
        self.control("update", "NodeName=node2", "State=RESUME")
        self.signal_the_job()  # a running job keeps its nodes

    def kill_a_rank(self) -> None:
        super().kill_a_rank()
        self.kills += 1

    def start_again(self) -> bool:
        """Queue a job again whose rank was killed before its first checkpoint."""
        if self.slurm.job_state(self.job) == "COMPLETED":
            return False
        self.kills -= 1
        assert self.kills >= 0, "the job has failed by itself"
        self.control("requeue", self.job)
        return wait_until(lambda: not self.has_ended(), 30)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            print((self.run_dir / "slurm.out").read_text())
        self.slurm.tear_down()
        subprocess.run(["rm", "-rf", str(self.run_dir)])


class ExactRun(LocalRun):
    """A run of the project's own launcher in float32, which must end with the bits of the undisturbed run."""

    strategies: ClassVar = [("ddp", 3), ("fsdp", 4), ("pipeline", 2), ("hybrid", 4), ("auto", 4), ("ddp_spawn", 2)]
    options: ClassVar = [*EXACT[1:], "module.channels_last=false"]  # FSDP supports contiguous filters


PLACES: dict[str, type[ElasticRun]] = {"local": LocalRun, "bits": ExactRun, "torchrun": TorchrunRun, "slurm": SlurmRun}
REASONS = {"local": None, "bits": None, "torchrun": no_hosts(), "slurm": no_slurm()}
CASES = [
    pytest.param(place, number, marks=pytest.mark.skipif(REASONS[place] is not None, reason=str(REASONS[place])))
    for place in PLACES
    for number in range(TRIALS if place in ("local", "bits") else -(-TRIALS // 4))
]


@pytest.fixture(scope="module")
def undisturbed(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Record]:
    """Return a function that trains on one process, once for each choice of options."""
    folder = tmp_path_factory.mktemp
    return functools.cache(lambda *options: fit(compose(folder("undisturbed"), *small, *TASK, *options)))


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "number"), CASES)
def test_random_faults_change_nothing(
    place: str, number: int, undisturbed: Callable[..., Record], small: list[str], tmp_path: Path
) -> None:
    run = PLACES[place](tmp_path, number, small)
    try:
        for _ in range(4):
            run.suffer()
        run.finish()
        reference = undisturbed(*run.options).file.parent
        check_last_checkpoints(run.run_dir, reference, 0.0 if run.options else TOLERANCE)
        if run.options:
            assert rows_of(run.run_dir) == rows_of(reference)
        check_same_rows(run.run_dir, reference)
    finally:
        run.close()
