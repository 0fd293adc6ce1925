"""`doctor=true` as a command, and its all-reduce, which names the ranks that do not answer."""

import faulthandler
import re
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf
from torch.distributed import HashStore

from onecurve.errors import RankFailedError, UserError
from onecurve.extras.doctor import all_reduce, examination
from onecurve.extras.doctor.examination import check_all_reduce, run_check
from tests.support.commands import TORCHRUN, run, run_here

QUICK = ["doctor=true", "trainer.accelerator=cpu", "logger=none"]


def test_two_processes(small: list[str], tmp_path: Path) -> None:
    """Lightning would start the ranks of this strategy itself."""
    out, _ = run_here(*small, *QUICK, "strategy=ddp_spawn", "trainer.devices=2", f"run_dir={tmp_path / 'run'}")
    assert re.findall(r"^(\w+) +(\S+)", out, re.MULTILINE) == [("ok", name) for name in examination.CHECKS]
    assert re.search(r"2 process\(es\) on 1 host\(s\), 64 MiB in \d.* ms, \d.* GB/s", out)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_ranks_of_torchrun(small: list[str], tmp_path: Path) -> None:
    """The checks of the first process build objects, and leave the configuration that it shares as it is."""
    options = [*QUICK, "strategy=ddp", "trainer.devices=2", f"run_dir={tmp_path / 'run'}"]
    out, _ = run("data=shapes", *options, program=TORCHRUN)
    assert [status for status, _ in re.findall(r"^(\w+) +(\S+)", out, re.MULTILINE)] == ["ok"] * len(examination.CHECKS)


def test_one_process_beside_a_run(small: list[str], tmp_path: Path) -> None:
    """It neither resumes a run in its folder nor removes what that run is saving."""
    part = tmp_path / "run" / "checkpoints" / ".last.ckpt.1.part"
    part.parent.mkdir(parents=True)
    part.touch()
    out, _ = run_here(*small, *QUICK, f"run_dir={tmp_path / 'run'}", "resume=auto")
    assert "all-reduce  1 process(es)" in out
    assert [file.name for file in (tmp_path / "run").rglob("*")] == ["checkpoints", part.name]


def test_error_is_exit_code_1(small: list[str], tmp_path: Path) -> None:
    out, _ = run_here(*QUICK, "data=folder", f"data.root={tmp_path}", f"run_dir={tmp_path / 'run'}", code=1)
    assert "\nerror    data        data.root=" in out
    assert "\nok       all-reduce" in out
    assert not (tmp_path / "run").exists()


def test_tasks_without_srun_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    status, text = run_check(check_all_reduce, OmegaConf.create())
    assert status == "error"
    assert "start `srun python train.py ...`" in text


def test_a_rank_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    died = RankFailedError("rank 1 died (Signal 9 (SIGKILL)); its log is /run/logs/rank1.log\ntrace")
    monkeypatch.setattr(examination, "launch", Mock(side_effect=died))
    cfg = OmegaConf.create({"launch": {}, "trainer": {"num_nodes": 1}, "strategy": {}})
    assert run_check(check_all_reduce, cfg) == ("error", "rank 1 died (Signal 9 (SIGKILL))")


def test_names_ranks_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "_TIMEOUT", 0.1)
    store = HashStore()
    store.set("ready/2", "")
    with pytest.raises(UserError, match="from rank 1, 3: see `nvidia-smi`"):
        all_reduce._names_of_hosts(store, 0, 4)


def test_communication_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "_TIMEOUT", 0.1)
    monkeypatch.setattr(all_reduce, "_time_all_reduce", lambda *_: time.sleep(30))
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)  # it would end the tests
    begun = time.monotonic()
    with pytest.raises(
        UserError, match=r"the ranks on \S+ are ready, .* set NCCL_SOCKET_IFNAME .* NCCL_DEBUG=INFO shows"
    ):
        all_reduce.measure_all_reduce(OmegaConf.create({"trainer": {"accelerator": "cpu"}}))
    assert time.monotonic() - begun < 25
