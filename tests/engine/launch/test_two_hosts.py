"""Two hosts under torchrun: every strategy, faults of a rank and of the network, and `doctor=true`."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onecurve.records.events import read_events
from tests.support.commands import ROOT, count_lines, ranks, slow, wait_until
from tests.support.comparison import TOLERANCE, read_rows, relative
from tests.support.hosts import Hosts, skip_reason
from tests.support.runs import compose, fit

REASON = skip_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TRAIN = [str(ROOT / "train.py"), "experiment=parity", "logger=none", "trainer.enable_progress_bar=false", "test=false"]
ON_TWO = ["trainer.accelerator=cpu", "trainer.num_nodes=2"]
PORT = 29400


def runs_in(folder: Path) -> str:
    """Return the override that makes new run folders in `folder`/runs."""
    return f"hydra.run.dir=${{run_folder:{folder}/runs,run}}"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    pair = Hosts(tmp_path)
    try:
        pair.set_up()
        yield pair
    finally:
        pair.tear_down()


def torchrun(address: str, processes: int) -> list[str]:
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{PORT}", "--rdzv-id=tests"]
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={processes}", *meeting]


def check(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Check that there is one run, with these final weights."""
    (file,) = folder.glob("runs/*/checkpoints/last.ckpt")
    found = torch.load(file)["state_dict"]
    assert max(relative(found[name], tensor) for name, tensor in expected.items()) < TOLERANCE


def wait_for_all(processes: list[Any], logs: list[Path], seconds: float = 240) -> list[int]:
    try:
        codes = [process.wait(seconds) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        pytest.fail("\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs))
    return codes


@pytest.fixture(scope="module")
def weights(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the weights after a single process has trained."""
    return fit(compose(tmp_path_factory.mktemp("single"), *small, "experiment=parity")).final


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        pytest.param("ddp", 1, marks=pytest.mark.slow),
        pytest.param("fsdp", 1, marks=pytest.mark.slow),
        pytest.param("pipeline", 1, marks=pytest.mark.slow),
        pytest.param("hsdp", 2, marks=pytest.mark.slow),
        pytest.param("hybrid", 2, marks=pytest.mark.slow),
    ],
)
def test_agrees_with_single_process_under_torchrun(
    strategy: str, processes: int, hosts: Hosts, weights: Any, small: list[str], tmp_path: Path
) -> None:
    words = [*TRAIN, *small, *ON_TWO, runs_in(tmp_path), f"strategy={strategy}", f"trainer.devices={processes}"]
    logs = [tmp_path / f"{host}.log" for host in (0, 1)]
    command = [*torchrun(hosts.addresses[0], processes), *words]
    started = [hosts.start(host, command, logs[host], tmp_path) for host in (0, 1)]
    assert wait_for_all(started, logs) == [0, 0], logs[0].read_text() + logs[1].read_text()
    check(tmp_path, weights)


class Pair:
    """The same command on both hosts."""

    def __init__(self, hosts: Hosts, folder: Path, *words: str, restarts: int = 0) -> None:
        self.folder = folder
        self.logs = [folder / f"{host}.log" for host in (0, 1)]
        self.command = [*torchrun(hosts.addresses[0], 1), f"--max-restarts={restarts}", *TRAIN, *ON_TWO]
        self.command += ["strategy=ddp", "trainer.devices=1", f"run_dir={folder}/runs/one", *words]
        self.started = [hosts.start(host, self.command, self.logs[host], folder) for host in (0, 1)]

    def exit_codes(self) -> list[int]:
        return wait_for_all(self.started, self.logs)

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks that run."""
        return [rank for process in self.started for rank in ranks(process.pid)]

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has logged `step` steps."""
        reached = wait_until(lambda: count_lines(self.folder / "runs" / "one") > step, 120)
        assert reached, self.logs[0].read_text() + self.logs[1].read_text()


@pytest.mark.slow
def test_dead_rank_on_one_host(
    hosts: Hosts, weights: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts the ranks of both hosts again."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # docs/clusters.md
    often = ["callbacks.checkpoint.every_n_train_steps=1", "resume=auto", slow(0.3)]
    pair = Pair(hosts, tmp_path, *small, *often, restarts=2)
    pair.wait_for_step(5)
    (victim,) = ranks(pair.started[1].pid)
    os.kill(victim, signal.SIGKILL)
    assert pair.exit_codes() == [0, 0], pair.logs[0].read_text() + pair.logs[1].read_text()
    check(tmp_path, weights)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_a_host_leaves_and_returns(
    strategy: str, hosts: Hosts, weights: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun 1:2: its signal lets all ranks save, and the run goes on with the hosts that there are."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # docs/clusters.md
    folder, logs = tmp_path / "runs" / "one", [tmp_path / f"{name}.log" for name in ("first", "second", "returned")]
    command = [word.replace("--nnodes=2", "--nnodes=1:2") for word in torchrun(hosts.addresses[0], 1)]
    command += ["--rdzv-conf=last_call_timeout=2", "--max-restarts=3", *TRAIN, *small, "trainer.accelerator=cpu"]
    command += [f"strategy={strategy}", "launch.elastic=true", "resume=auto", f"run_dir={folder}", slow(1.5)]
    first, second = (hosts.start(host, command, logs[host], tmp_path) for host in (0, 1))
    wait_for_world(folder, [2], 2, logs)
    second.terminate()
    wait_for_world(folder, [2, 1], 4, logs)
    returned = hosts.start(1, command, logs[2], tmp_path)
    assert wait_for_all([first, returned, second], logs)[:2] == [0, 0], "\n".join(log.read_text() for log in logs)
    check(tmp_path, weights)
    assert [row["step"] for row in read_rows(folder)] == [str(step) for step in range(20)]
    events = read_events(folder)
    assert worlds(folder) == [2, 1, 2]
    stopped, resumed = ([event["step"] for event in events if event["event"] == name] for name in ("stopped", "resume"))
    assert stopped == resumed, "steps are lost"
    assert [event["reason"] for event in events if event["event"] == "stopped"] == ["SIGTERM", "SIGTERM"]


def worlds(folder: Path) -> list[int]:
    """Return the number of ranks of each start."""
    return [event["world_size"] for event in read_events(folder) if event["event"] in ("start", "resume")]


def wait_for_world(folder: Path, expected: list[int], step: int, logs: list[Path]) -> None:
    """Wait until the run has started with these numbers of ranks, and has logged `step` steps."""
    reached = wait_until(lambda: worlds(folder) == expected and count_lines(folder) > step, 120)
    assert reached, "\n".join(log.read_text()[-3000:] for log in logs if log.exists())


@pytest.mark.slow
def test_link_cut_temporarily(hosts: Hosts, weights: Any, small: list[str], tmp_path: Path) -> None:
    pair = Pair(hosts, tmp_path, *small, slow(0.2))
    pair.wait_for_step(5)
    hosts.link("down")
    time.sleep(5)
    hosts.link("up")
    assert pair.exit_codes() == [0, 0], pair.logs[0].read_text() + pair.logs[1].read_text()
    check(tmp_path, weights)


@pytest.mark.slow
def test_link_cut_permanently(hosts: Hosts, weights: Any, small: list[str], tmp_path: Path) -> None:
    """The ranks end within the timeout, and the run resumes elsewhere from its checkpoint. torchrun may wait longer."""
    often = ["callbacks.checkpoint.every_n_train_steps=1", "launch.timeout=10", slow(0.2)]
    pair = Pair(hosts, tmp_path, *small, *often)
    pair.wait_for_step(5)
    hosts.link("down")
    assert wait_until(lambda: not pair.ranks(), 60), "the ranks have not ended"
    for process in pair.started:
        process.kill()
    assert any("Timeout (0:00:10)!" in file.read_text() for file in tmp_path.glob("runs/one/logs/*.log"))
    command = [sys.executable, *TRAIN[:1], f"ckpt_path={tmp_path}/runs/one", "trainer.num_nodes=1", "trainer.devices=2"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    check(tmp_path, weights)


@pytest.mark.slow
def test_doctor_on_two_hosts(hosts: Hosts, small: list[str], tmp_path: Path) -> None:
    """Each host is checked by its first rank; the second host prints problems only."""
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    task = [str(ROOT / "train.py"), "doctor=true", "logger=none", *small, *ON_TWO, "strategy=ddp", "trainer.devices=1"]
    started = []
    for host, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        command = [*torchrun(hosts.addresses[0], 1), *task, runs_in(tmp_path / name)]
        started.append(hosts.start(host, command, logs[host], tmp_path / name))
    assert wait_for_all(started, logs) == [0, 0]
    assert re.search(r"all-reduce +2 process\(es\) on 2 host\(s\), 64 MiB in", logs[0].read_text())
    assert re.search("^ok +data", logs[1].read_text(), re.MULTILINE) is None
    assert not list(tmp_path.glob("*/runs/*"))
