"""Several hosts: every strategy over torchrun, and over the same command typed on each of them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.hosts import Hosts, why_not
from tests.parity.test_parity import TOLERANCE
from tests.runs import compose, fit, relative

ROOT = Path(__file__).parents[2]
REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TRAIN = [str(ROOT / "train.py"), "experiment=parity", "logger=none", "trainer.enable_progress_bar=false", "test=false"]
ON_TWO = ["trainer.accelerator=cpu", "trainer.num_nodes=2"]
PORT = 29400


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    pair = Hosts(tmp_path)
    try:
        pair.up()
        yield pair
    finally:
        pair.down()


def torchrun(address: str, processes: int) -> list[str]:
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{PORT}", "--rdzv-id=tests"]
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={processes}", *meeting]


def finish(processes: list[Any], logs: list[Path], seconds: float = 240) -> list[int]:
    try:
        codes = [process.wait(seconds) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        pytest.fail("\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs))
    return codes


@pytest.fixture(scope="module")
def weights(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of the single process's run, with as many micro-batches."""

    def run(micro_batches: int) -> dict[str, torch.Tensor]:
        accumulate = f"trainer.accumulate_grad_batches={micro_batches}"
        return fit(compose(tmp_path_factory.mktemp("single"), *small, "experiment=parity", accumulate)).final

    return run


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        ("ddp", 1),
        pytest.param("fsdp", 1, marks=pytest.mark.slow),
        ("pipeline", 1),
        pytest.param("hsdp", 2, marks=pytest.mark.slow),
        pytest.param("hybrid", 2, marks=pytest.mark.slow),
    ],
)
def test_torchrun(strategy: str, processes: int, hosts: Hosts, weights: Any, small: list[str], tmp_path: Path) -> None:
    expected = weights(4 if strategy in ("pipeline", "hybrid") else 1)
    words = [*TRAIN, *small, *ON_TWO, f"strategy={strategy}", f"trainer.devices={processes}"]
    logs = [tmp_path / f"{host}.log" for host in (0, 1)]
    command = [*torchrun(hosts.addresses[0], processes), *words]
    started = [hosts.start(host, command, logs[host], tmp_path) for host in (0, 1)]
    assert finish(started, logs) == [0, 0], logs[0].read_text() + logs[1].read_text()
    (folder,) = (tmp_path / "runs").iterdir()
    found = torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"]
    assert max(relative(found[name], tensor) for name, tensor in expected.items()) < TOLERANCE
