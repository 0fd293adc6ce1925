"""Each check of `doctor=true` finds its bad case, and says what to do."""

import os
import resource
import shutil
import socket
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from src.doctor import hardware, limits, versions
from src.doctor.clock import check_clock, check_difference
from src.doctor.data import check_data
from src.doctor.finding import Finding, run_check
from src.doctor.hardware import check_cores, check_devices
from src.doctor.limits import check_locked_memory, check_open_files, check_shared_memory
from src.doctor.network import check_backends, check_interfaces, check_ports
from src.doctor.slurm import check_slurm
from src.doctor.versions import check_packages, check_python
from src.doctor.wandb import check_wandb
from src.launch.failures import RankFailedError
from src.utils.errors import UserError
from src.utils.files import check_can_store
from tests.support.runs import compose

TWO_HOSTS = ["trainer.num_nodes=2", "trainer.devices=2"]
JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "1"}


@cache
def default() -> DictConfig:
    return compose(Path("run"))


def cfg_of(*options: str) -> DictConfig:
    """Return the default configuration with some options changed; to compose it each time would take seconds."""
    return cast(DictConfig, OmegaConf.merge(default(), OmegaConf.from_dotlist(list(options))))


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int, driver: Path | None = None) -> None:
    """Make torch report GPUs, and the system an NVIDIA driver if its file is given."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=141 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(hardware, "_DRIVER", driver or Path("/nowhere"))


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """Return the file of an NVIDIA driver."""
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\nGCC version: 12\n")
    return file


def test_problems_and_failures_become_findings() -> None:
    def fail(error: Exception) -> Any:
        def check(cfg: DictConfig) -> str:
            raise error

        return run_check("disk", check, cfg_of())

    assert run_check("disk", lambda cfg: "fine", cfg_of()) == Finding("disk", True, "fine")
    assert fail(UserError("full:\n  delete something")) == Finding("disk", False, "full: delete something")
    assert fail(KeyError("free")).text == "the check failed: KeyError: 'free'"
    died = "rank 1 died (Signal 9 (SIGKILL))"
    assert fail(RankFailedError(f"{died}; its log is /run/logs/rank1.log\ntrace")).text == died


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_python(cfg_of())
    assert "lightning 2." in check_packages(cfg_of())
    monkeypatch.setattr("platform.python_version", lambda: "3.14.0")
    with pytest.raises(UserError, match=r"Python 3.14.0 is not >=3.10,<3.14 \(Hydra 1.3 breaks on 3.14\)"):
        check_python(cfg_of())


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("lightning", "2.6.3", "lightning 2.6.3 contains malware .* change all passwords"),
        ("lightning", "2.6.1", r"lightning 2.6.1 is not >=2.6.4 \(2.6.2 and 2.6.3 were compromised\): run `make"),
        ("torch", "2.5.1+cu124", "torch 2.5.1.cu124 is not >=2.10 "),
        ("rich", None, "rich is not installed: run `make install`"),
    ],
)
def test_wrong_packages(name: str, version: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = versions._installed
    monkeypatch.setattr(versions, "_installed", lambda other: version if other == name else installed(other))
    with pytest.raises(UserError, match=message):
        check_packages(cfg_of())


def test_gpus(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = cfg_of("trainer.devices=2", "trainer.accelerator=auto")
    pretend_gpus(monkeypatch, 4, driver)
    assert "2 of 4: 4 x NVIDIA H200, 141 GiB" in check_devices(two)
    assert "driver 535.104.05" in check_devices(two)
    pretend_gpus(monkeypatch, 1, driver)
    with pytest.raises(UserError, match=r"trainer.devices=2, but this machine has 1 GPU"):
        check_devices(two)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(UserError, match="2 processes share 1 core"):
        check_cores(two)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(UserError, match="has no NCCL"):
        check_backends(two)


def test_gpus_that_torch_cannot_use(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 0, driver)
    cfg = cfg_of("trainer.accelerator=auto")
    for build, message in ((None, "is built without CUDA: install"), ("13.0", "CUDA 13.0 cannot start with")):
        monkeypatch.setattr(torch.version, "cuda", build)
        with pytest.raises(UserError, match=message):
            check_devices(cfg)
    assert "on the CPU" in check_devices(cfg_of("trainer.accelerator=cpu"))


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr(resource, "getrlimit", lambda number: (512, 512))
    assert check_shared_memory(cfg_of()) == "0.1 GiB free"
    with pytest.raises(UserError, match=r"/dev/shm has 64 MiB free, .* start the container with --ipc=host"):
        check_shared_memory(cfg_of("data.num_workers=2"))
    with pytest.raises(UserError, match="`ulimit -n` is 512, but this run may need 1024"):
        check_open_files(cfg_of())
    monkeypatch.setattr(limits, "_INFINIBAND", tmp_path / "infiniband")
    assert "which this machine does not have" in check_locked_memory(cfg_of(*TWO_HOSTS))
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    with pytest.raises(UserError, match="InfiniBand needs unlimited"):
        check_locked_memory(cfg_of(*TWO_HOSTS))
    with pytest.raises(UserError, match=r"has 0.1 GB free, which is less than 1.0 GB: .* set run_dir to"):
        check_can_store(tmp_path / "new" / "run", "run_dir", 10**9)
    assert not (tmp_path / "new").exists()


def test_folder_that_cannot_be_written() -> None:
    with pytest.raises(UserError, match=r"cannot write to /proc/new .* set data.root to another"):
        check_can_store(Path("/proc/new"), "data.root", 0)


def test_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "0.5" in check_difference(0.5)
    with pytest.raises(UserError, match=r"differ by 3.0 s: start NTP"):
        check_difference(3.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with pytest.raises(UserError, match=r"the clock of this host \(1970-01-01\) is behind"):
        check_clock(cfg_of())


def test_slurm_job_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_slurm(cfg_of()) == "not in a SLURM job"
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert check_slurm(cfg_of(*TWO_HOSTS)) == "job 7, 4 task(s)"
    monkeypatch.setenv("SLURM_NTASKS", "2")  # torchrun starts the processes of each host from one task
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    assert check_slurm(cfg_of(*TWO_HOSTS)) == "job 7, 2 task(s)"


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"SLURM_NTASKS": "2"}, [], "2 tasks, but trainer.devices=2 x trainer.num_nodes=2: set --ntasks-per-node=2"),
        ({"SLURM_NNODES": "1"}, [], "1 nodes, but trainer.num_nodes=2: set --nodes=2"),
        ({}, ["data.num_workers=3"], r"1 core\(s\) for 4 processes, .* set --cpus-per-task=4"),
        ({"SLURM_STEP_ID": None}, [], "no srun: start `srun python train.py"),
        ({"SLURM_GPUS_ON_NODE": "1"}, ["trainer.accelerator=auto"], r"1 GPU\(s\) per node, .* set --gpus-per-node=2"),
    ],
)
def test_slurm_job_that_does_not_fit(
    changes: dict[str, str | None], overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (JOB | changes).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        check_slurm(cfg_of(*TWO_HOSTS, *overrides))


def test_ports() -> None:
    assert check_ports(cfg_of()) == "any free port of this host"


def test_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lo" in check_interfaces(cfg_of())
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(UserError, match=r"has 127.0.1.1, to which other hosts cannot connect: set GLOO_SOCKET_IFNAME"):
        check_interfaces(cfg_of(*TWO_HOSTS))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    assert check_interfaces(cfg_of(*TWO_HOSTS))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib7")
    with pytest.raises(UserError, match="NCCL_SOCKET_IFNAME==ib7: this host has no ib7, but lo"):
        check_interfaces(cfg_of())


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "shapes", "folder", "npz", "huggingface"])
def test_data_that_exists(data: str, local_data: dict[str, list[str]]) -> None:
    assert check_data(compose(Path("run"), *local_data[data]))


def test_data_that_is_missing_or_corrupt(tmp_path: Path, cifar: Path) -> None:
    root = tmp_path / "new"
    absent = ["data.source.urls=[http://127.0.0.1:9]", f"data.root={root}"]
    with pytest.raises(UserError, match=r"cifar-10-python.tar.gz does not exist and cannot be downloaded"):
        check_data(cfg_of(*absent))
    assert "will be generated in" in check_data(compose(Path("run"), "data=shapes", f"data.root={root}"))
    assert not root.exists()
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(bytes(2_000_000))
    with pytest.raises(UserError, match=r"cifar-10-python.tar.gz is corrupt"):
        check_data(cfg_of(absent[0], f"data.root={tmp_path}"))
    shutil.copytree(cifar, root)
    (root / "cifar-10-batches-py" / "test_batch").write_bytes(b"")
    with pytest.raises(UserError, match="test_batch is missing or corrupt"):
        check_data(cfg_of(f"data.root={root}"))


def _refuse_key(**_: Any) -> bool:
    raise ValueError("API key must have 40+ characters, has 5.")


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    cfg = compose(Path("run"), "logger=wandb", quiet=False)
    assert check_wandb(cfg_of()) == "not used: there is no logger.wandb"
    assert check_wandb(cfg) == "offline, because WANDB_MODE=offline"
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(UserError, match="WANDB_MODE=online, but no API key is configured"):
        check_wandb(cfg)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "teardown", lambda: None)
    monkeypatch.setattr(wandb, "Api", lambda timeout: SimpleNamespace(viewer=SimpleNamespace(username="ann")))
    assert check_wandb(cfg) == "online as ann"
    monkeypatch.setattr(wandb, "Api", lambda timeout: SimpleNamespace())
    with pytest.raises(UserError, match=r"no login .* or set WANDB_MODE=offline"):
        check_wandb(cfg)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(wandb, "login", _refuse_key)
    with pytest.raises(UserError, match=r"no login \(.*40\+ characters"):
        check_wandb(cfg)
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    assert check_wandb(cfg).startswith("offline, because no API key is configured")
