"""Ranks that torchrun or srun started: who they are, and what they say when one of them is missing or fails."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from onecurve.errors import UserError
from onecurve.launch import external
from onecurve.process import started_by
from onecurve.process.started_by import detect_cluster_environment
from tests.support.commands import slurm_task

TASK = slurm_task(1, port=29500)
SCRIPT = {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"}
STALE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def setenv(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("RANK", "SLURM_PROCID", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    def set_all(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    ("variables", "rank", "is_kept"),
    [
        (STALE, 0, False),
        ({"SLURM_PROCID": "1"}, 0, False),
        (SCRIPT, 0, False),
        (TASK, 1, True),
        (STALE | {"TORCHELASTIC_RUN_ID": "x"}, 1, True),
        (TASK | {"SLURM_NTASKS": "1"}, 0, False),
        (TASK | {"SLURM_JOB_NAME": "bash"}, 0, False),
    ],
    ids=["shell of torchrun", "shell of SLURM", "script", "task", "torchrun", "one task", "interactive"],
)
def test_only_a_launcher_gives_a_rank(variables: dict[str, str], rank: int, is_kept: bool, setenv: Any) -> None:
    setenv(variables)
    assert started_by.started_rank() == rank
    env = detect_cluster_environment()
    assert (env.global_rank() if env else 0) == rank
    assert (env is not None) == is_kept
    started_by.forget_other_ranks()
    left = {name for name in variables if name in started_by.os.environ}
    assert (left == set(variables)) == (is_kept or variables == {})


def test_a_script_that_starts_a_rank_without_srun_is_refused(setenv: Any) -> None:
    setenv(TASK)
    started_by.check_tasks_are_started()
    setenv({"TORCHELASTIC_RUN_ID": "x"})
    started_by.os.environ.pop("SLURM_STEP_ID")
    started_by.check_tasks_are_started()
    started_by.os.environ.pop("TORCHELASTIC_RUN_ID")
    with pytest.raises(UserError, match=r"SLURM_NTASKS=2.*start `srun python train.py ...`"):
        started_by.check_tasks_are_started()


def share(*configs: dict[str, Any]) -> dict[int, Any]:
    """Return what each of the started ranks gets by its number: the configuration, or the exception."""
    store, found = dist.HashStore(), dict[int, Any]()

    def share_one(rank: int, config: dict[str, Any]) -> None:
        try:
            found[rank] = external.share_config(store, rank, 2, OmegaConf.create(config))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=share_one, args=each) for each in enumerate(configs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_any_error_of_rank_zero_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cfg: DictConfig) -> DictConfig:
        raise ValueError("a bug")

    monkeypatch.setattr(external, "resolve_config", fail)
    found = share(*[{"launch": {"elastic": False}}] * 2)
    assert repr(found[0]) == "ValueError('a bug')"
    assert isinstance(found[1], UserError)
    assert str(found[1]) == "rank 0 failed: a bug"


def test_an_option_that_differs_between_ranks_is_named() -> None:
    found = share(*[{"launch": {"elastic": False}, "optimizer": {"lr": rate}} for rate in (0.1, 0.2)])
    assert all("process 1 was started with another optimizer.lr than process 0" in str(found[rank]) for rank in (0, 1))


def test_a_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(external, "_PATIENCE", timedelta(milliseconds=1))
    monkeypatch.setattr(external, "_TIMEOUT", timedelta(milliseconds=1))
    found = share({"launch": {"elastic": False}})
    assert capsys.readouterr().err == 2 * "waiting for rank 1 of 2\n"
    assert isinstance(found[0], UserError)
    assert "start all 2 ranks at once" in str(found[0])
