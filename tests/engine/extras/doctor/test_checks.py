"""Each check of `doctor=true` finds its bad case, and says what to do."""

import re
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
import torch
import wandb
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from onecurve.errors import UserError
from onecurve.extras.doctor import examination
from onecurve.extras.doctor.examination import CHECKS, run_check
from tests.support.runs import compose

TWO_HOSTS = ["trainer.num_nodes=2", "trainer.devices=2"]
JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"}


@cache
def default() -> DictConfig:
    return compose(Path("run"))


def finding(check: str, *options: str, cfg: DictConfig | None = None) -> str:
    """Return the status and the text of a check, for `cfg` or the default configuration with some options."""
    cfg = cfg or cast(DictConfig, OmegaConf.merge(default(), OmegaConf.from_dotlist(list(options))))
    return ": ".join(run_check(CHECKS[check], cfg))


def test_save_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The interval grows with the root of the time between failures."""
    monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(runtime=SimpleNamespace(output_dir=tmp_path)))
    text = finding("saving", "model.width=8")
    found = re.search(r"ok: a checkpoint of (\S+) MB takes (\S+) s: .* to (\d+) s with .* hour, or (\d+) s with", text)
    assert found, text
    size, seconds, hourly, daily = map(float, found.groups())
    assert size >= 1
    assert hourly == pytest.approx((7200 * seconds) ** 0.5, abs=7)  # of seconds that are rounded to hundredths
    assert daily == pytest.approx(24**0.5 * hourly, abs=4)
    assert not list(tmp_path.iterdir())


VECTORS = ["~data", "~module", "~model", "~optimizer", "~scheduler", "+data._target_=tests.support.habits.VectorData"]
VECTORS += ["callbacks=none", "test=false", "strategy=fsdp", "trainer.devices=4"]
VECTORS += ["+module._target_=tests.support.habits.Vectors"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mean", "ok: the loss of 33 samples is the mean of those of their halves"),
        ("class_weights", r"error: Vectors.training_step does not divide by samples: .* Set bit_exact=true"),
        ("numpy_mixup", r"error: .* draws numbers of NumPy or Python for each sample, .* Set bit_exact=true"),
    ],
)
def test_loss_check(kind: str, message: str, folder: Path) -> None:
    assert re.match(message, finding("loss", cfg=compose(folder, *VECTORS, f"+module.kind={kind}")))
    assert not folder.exists()


def test_loss_of_weighted_batches(small: list[str], folder: Path) -> None:
    assert finding("loss", cfg=compose(folder, *small, "model=mlp")).startswith("ok: not checked: the module takes")


def test_data_without_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A DataModule of one's own need not have the option."""
    monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(runtime=SimpleNamespace(output_dir=tmp_path)))
    monkeypatch.setattr(examination, "_MIN_FREE_BYTES", 0)
    cfg = OmegaConf.create({"data": {"_target_": "mine.Data"}})
    assert finding("disk", cfg=cfg).startswith("ok: ")


class Disks:
    """A class of a user's, with a check of its own."""

    @staticmethod
    def examine(cfg: DictConfig) -> str:
        return f"{cfg.disks.count} disks"


def test_a_class_of_the_configuration_may_offer_a_check() -> None:
    cfg = OmegaConf.create(
        {"disks": {"_target_": f"{__name__}.Disks", "count": 2}, "other": {"_target_": "torch.Size"}}
    )
    checks = examination.own_checks(cfg)
    assert checks.keys() == {"disks"}
    assert run_check(checks["disks"], cfg) == ("ok", "2 disks")


def test_exceptions_become_errors() -> None:
    assert run_check(Mock(side_effect=UserError("full")), default()) == ("error", "full")
    assert run_check(Mock(side_effect=KeyError("x")), default()) == ("error", "the check failed: KeyError: 'x'")


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("Python", "3.14.0", r"Python 3.14.0, but Python<3.14,>=3.10 is required: remove"),
        ("torch", "2.5.1+cu124", r"torch 2.5.1\+cu124, but torch>=2.10 is required: "),
        ("rich", None, "rich is missing, but rich>=13 is required: remove .venv and run `make install`"),
    ],
)
def test_wrong_versions(name: str, version: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = examination._installed
    monkeypatch.setattr(examination, "_installed", lambda other: version if other == name else installed(other))
    assert re.match(f"error: {message}", finding("versions"))


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(available: int, accelerator: str = "auto") -> str:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available > 0)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: available > 0)
        for module in (torch.cuda, torch.accelerator):
            monkeypatch.setattr(module, "device_count", lambda: available)
        return finding("devices", "trainer.devices=2", f"trainer.accelerator={accelerator}")

    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=141 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(examination, "_NVIDIA_DRIVER", tmp_path)
    assert check(4).startswith("ok: 2 of 4 x NVIDIA H200, 141 GiB; torch for CUDA")
    assert check(1).startswith("error: trainer.devices=2, but this machine has 1 GPU")
    assert check(0).startswith("error: this host has an NVIDIA driver, but torch")
    assert check(0, "cpu") == "ok: cpu, 2 process(es)"


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hydra = SimpleNamespace(runtime=SimpleNamespace(output_dir=str(tmp_path / "new" / "run")))
    monkeypatch.setattr(HydraConfig, "get", lambda: hydra)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 << 20))
    full = r"error: \S+/new/run has 0.1 GB free, which is less than 2.0 GB: .* set run_dir to"
    assert re.match(full, finding("disk"))
    shared_memory = r"error: /dev/shm has less than 512 MiB free, .* start the container with --ipc=h"
    assert re.match(shared_memory, finding("disk", "data.num_workers=2"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 << 30))
    assert finding("disk", "data.num_workers=2") == f"ok: 69 GB free in {tmp_path / 'new' / 'run'}"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "ok: job 7, 4 task"),
        ({"SLURM_NTASKS": "2", "TORCHELASTIC_RUN_ID": "x"}, "ok: job 7, 2 task"),  # torchrun starts each host's ranks
        ({"SLURM_NTASKS": "2"}, "error: the job has 2 .* trainer.devices=2 .*: set --nodes=2 --ntasks-per-node=2"),
        ({"SLURM_NNODES": "1"}, "error: the job has 4 .* on 1 node.*, but .* trainer.num_nodes=2: set --nodes=2"),
    ],
)
def test_slurm(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("slurm") == "ok: not in a SLURM job"
    for name, value in (JOB | variables).items():
        monkeypatch.setenv(name, value)
    assert re.match(message, finding("slurm", *TWO_HOSTS))


def test_data_that_is_missing_or_corrupt(tmp_path: Path, cifar: Path) -> None:
    root = tmp_path / "new"
    no_server = "data.source.urls=[http://127.0.0.1:9]"
    absent = finding("data", no_server, f"data.root={root}")
    assert re.match(r"error: .*cifar-10-python.tar.gz does not exist and cannot be downloaded", absent)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(bytes(2_000_000))
    assert "cifar-10-python.tar.gz is corrupt" in finding("data", no_server, f"data.root={tmp_path}")
    shutil.copytree(cifar, root, dirs_exist_ok=True)
    (root / "cifar-10-batches-py" / "test_batch").write_bytes(b"")
    assert "test_batch is missing or corrupt" in finding("data", f"data.root={root}")


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose(Path("run"), "logger=wandb", quiet=False)

    monkeypatch.setattr(wandb, "teardown", lambda: None)
    assert finding("wandb") == "ok: not used: there is no logger.wandb"
    assert finding("wandb", cfg=cfg) == "ok: offline"  # by WANDB_MODE
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    monkeypatch.delenv("WANDB_MODE")
    assert finding("wandb", cfg=cfg).startswith("ok: offline, because no API key is configured: run `wandb login`")
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "Api", lambda timeout: SimpleNamespace(viewer=SimpleNamespace(username="ann")))
    assert finding("wandb", cfg=cfg) == "ok: online as ann"
    monkeypatch.setattr(wandb, "Api", lambda timeout: SimpleNamespace())
    assert re.match(r"error: no login .* or set WANDB_MODE=offline", finding("wandb", cfg=cfg))
    refuse_key = Mock(side_effect=ValueError("API key must have 40+ characters, has 5."))
    monkeypatch.setattr(wandb, "login", refuse_key)
    assert re.match(r"error: no login \(.*40\+ characters", finding("wandb", cfg=cfg))
