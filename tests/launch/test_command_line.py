"""The real command line: what it prints, where things land, and how it fails. Each start costs seconds: few, full."""

import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]
TINY = [
    "model=mlp",
    "model.hidden=[16]",
    "data.batch_size=32",
    "trainer.max_epochs=2",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
]


def start(*arguments: str, program: tuple[str, ...] = ("train.py",), **variables: str) -> "subprocess.Popen[str]":
    environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"} | variables
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run(*arguments: str, code: int = 0, program: tuple[str, ...] = ("train.py",), **variables: str) -> tuple[str, str]:
    """Run a command to its end; nothing of its process group may be left then."""
    process = start(*arguments, program=program, **variables)
    try:
        out, err = process.communicate(timeout=200)
    finally:
        left = _kill_group(process.pid)
    assert process.returncode == code, err[-3000:]
    assert not left, "processes left running"
    return out, err


def _kill_group(group: int) -> bool:
    """Whether anything was left of the group some seconds after its leader: Python's resource tracker takes one."""
    for _ in range(50):
        if not subprocess.run(["pgrep", "-g", str(group)], capture_output=True).stdout:
            return False
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    return True


def one_line(err: str) -> str:
    """The error message, which must be all there is but for warnings."""
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    return lines[0]


def test_help_is_complete_and_imports_nothing_heavy() -> None:
    """It takes half a second; what could make it slow is an import."""
    watched = (
        "import atexit, runpy, sys; sys.argv[0] = 'train.py'; sys.path.insert(0, '');"
        "atexit.register(lambda: print('heavy:', {'torch', 'lightning', 'wandb', 'numpy'} & set(sys.modules)));"
        "runpy.run_path('train.py', run_name='__main__')"
    )
    out, _ = run("--help", program=("-c", watched))
    assert "heavy: set()" in out
    assert all(hint in out for hint in ("strategy", "ddp_spawn", "ckpt_path", "data=shapes", "fit=false", "debug"))


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (["strategy=dpp"], ["strategy=dpp", "ddp"]),
        (["model=resnet8"], ["model=resnet8", "resnet18"]),
        (["callbacks=[default,emma]"], ["callbacks=emma", "ema"]),
        (["trainer.device=4"], ["trainer.device ", "trainer.devices"]),
        (["lr=4"], ["lr ", "optimizer.lr"]),
        (["trainer.devices=none"], ["trainer.devices=none"]),
        (["ckpt_path=nowhere"], ["ckpt_path=nowhere"]),
        pytest.param(["trainer.accelerator=gpu"], ["trainer.accelerator=gpu", "cpu"], id="no gpu"),
        (["optimizer.lr"], ["optimizer.lr"]),
        (["init_form=x"], ["init_form ", "init_from"]),
        (["init_from=nowhere"], ["init_from=nowhere"]),
        (["predict=nowhere"], ["predict=nowhere", "no such folder"]),
        (["predict=tests"], ["predict=", "no picture"]),
        (["trainer.num_nodes=2"], ["trainer.num_nodes=2", "torchrun"]),
    ],
)
def test_what_the_parent_finds_wrong(arguments: list[str], hints: list[str], tmp_path: Path) -> None:
    if "trainer.accelerator=gpu" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    _, err = run(*arguments, f"hydra.run.dir={tmp_path}/run", code=1)
    message = one_line(err)
    assert all(hint in message for hint in hints), message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (
            ["trainer.devices=3", "strategy=ddp", "data.batch_size=128"],
            ["data.batch_size=126 or 129", "trainer.devices"],
        ),
        (
            ["optimizer.lr=1e30", "trainer.devices=2", "strategy=ddp"],
            ["train/loss is nan", "optimizer.lr", "checkpoint: none yet"],
        ),
        (["data=cifar10", "data.root=/proc/data"], ["/proc/data", "data.root"]),
        (["module.lr_scaling=liner"], ["module.lr_scaling=liner", "linear"]),
        (["strategy=ddp_spawn", "trainer.devices=3"], ["data.batch_size=30 or 33"]),
    ],
)
def test_what_the_ranks_find_wrong(arguments: list[str], hints: list[str], small: list[str], tmp_path: Path) -> None:
    tiny = [name for name in (*small, *TINY) if not (arguments[0] == "data=cifar10" and name.startswith("data"))]
    _, err = run(*tiny, "logger=none", f"hydra.run.dir={tmp_path}/run", *arguments, code=1)
    message = one_line(err)
    assert all(hint in message for hint in hints), message


class Poison:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch poisoned",)


@pytest.mark.parametrize("damage", ["truncated archive", "poisoned pickle", "no data"])
def test_data_that_cannot_be_used(damage: str, cifar: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    if damage == "truncated archive":
        root.mkdir()
        (root / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b but not much of it")
    if damage == "poisoned pickle":
        shutil.copytree(cifar, root)
        (root / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps({b"data": Poison()}, protocol=4))
    arguments = [
        "trainer.devices=2",
        "strategy=ddp",
        "trainer.accelerator=cpu",
        "data.source.urls=[http://127.0.0.1:9]",
    ]
    _, err = run(*arguments, f"data.root={root}", "logger=none", f"hydra.run.dir={tmp_path}/run", code=1)
    hints = {"truncated archive": "is damaged", "poisoned pickle": "would run posix.system", "no data": "be downloaded"}
    assert hints[damage] in one_line(err)
    assert "data.root" in err
    assert not (ROOT / "poisoned").exists()


def test_more_devices_than_gpus(tmp_path: Path) -> None:
    """On a machine that seems to have one GPU: the parent only counts them."""
    pretend = (
        "import runpy, sys, torch; sys.argv[0] = 'train.py';"
        "torch.accelerator.is_available = lambda: True; torch.accelerator.device_count = lambda: 1;"
        "torch.accelerator.current_accelerator = lambda *_: torch.device('cuda');"
        "sys.path.insert(0, ''); runpy.run_path('train.py', run_name='__main__')"
    )
    _, err = run("trainer.devices=4", f"hydra.run.dir={tmp_path}/run", program=("-c", pretend), code=1)
    assert "trainer.devices=4, but this machine has 1 GPU: set trainer.devices=1" in one_line(err)


def test_torch_without_distributed(tmp_path: Path) -> None:
    pretend = (
        "import runpy, sys, torch; sys.argv[0] = 'train.py'; torch.distributed.is_available = lambda: False;"
        "sys.path.insert(0, ''); runpy.run_path('train.py', run_name='__main__')"
    )
    arguments = ["trainer.devices=2", "trainer.accelerator=cpu", f"hydra.run.dir={tmp_path}/run"]
    _, err = run(*arguments, program=("-c", pretend), code=1)
    assert "needs torch.distributed" in one_line(err)


def test_a_full_disk(small: list[str], tmp_path: Path) -> None:
    """The limit on a file's size is how a test can fill a disk: writing fails in the same place."""
    limited = (
        "import resource, runpy, sys; sys.argv[0] = 'train.py'; sys.path.insert(0, '');"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000)); runpy.run_path('train.py', run_name='__main__')"
    )
    arguments = [*small, *TINY, "logger=none", "trainer.devices=2", "strategy=ddp", f"hydra.run.dir={tmp_path}/run"]
    _, err = run(*arguments, program=("-c", limited), code=1)
    assert "cannot write the checkpoint" in one_line(err)
    assert f"ckpt_path={tmp_path}/run" in one_line(err)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_bug_keeps_its_traceback(small: list[str], tmp_path: Path) -> None:
    arguments = [*small, *TINY, "logger=none", "model.hidden=[no]", "trainer.devices=2", "strategy=ddp"]
    _, err = run(*arguments, f"hydra.run.dir={tmp_path}/run", code=1)
    assert "Traceback" in err
    assert "src/models/mlp.py" in err
    assert "rank0.log" in err or "rank1.log" in err


def test_the_error_of_the_rank_that_failed_is_the_one_shown(small: list[str], tmp_path: Path) -> None:
    """Only rank one raises; rank zero loses its connection, which is no news."""
    callback = "+callbacks.raising={_target_: tests.launch.raising.RaiseOnRankOne}"
    arguments = [*small, *TINY, "logger=none", "trainer.devices=2", "strategy=ddp", callback]
    _, err = run(*arguments, f"hydra.run.dir={tmp_path}/run", code=1)
    assert "rank 1 failed" in err
    assert "RuntimeError: only here" in err
    assert "rank1.log" in err


def test_one_run_from_start_to_evaluation(small: list[str], tmp_path: Path) -> None:
    """Two ranks with wandb; what lands in the folder; evaluating and continuing it; another network refused."""
    folder = tmp_path / "run with space"
    out, err = run(
        *small, *TINY, "trainer.devices=2", "strategy=ddp", f"hydra.run.dir='{folder}'", WANDB_MODE="offline"
    )
    assert "Traceback" not in err
    assert out.count("DDP, 2 process(es) on cpu") == 1
    for fact in (
        "32 = 2 x 1 micro-batches x 16 per device",
        "drawn shapes",
        "after scaling",
        str(folder),
        "wandb sync",
    ):
        assert fact in out
    assert re.search(r"^done: .*test/acc", out, re.MULTILINE)
    for name in ("config.yaml", "metrics.csv", "checkpoints/last.ckpt", "logs/rank0.log", "logs/rank1.log"):
        assert (folder / name).is_file()
    assert len(list((folder / "wandb").glob("offline-run-*/*.wandb"))) == 1
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(name.startswith("net.") for name in checkpoint["state_dict"])
    assert "strategy:" in checkpoint["config"]

    def accuracy(printed: str) -> str:
        return re.findall(r"test/acc ([\d.]+)", printed)[-1]

    evaluated, _ = run("fit=false", f"ckpt_path='{folder}'", "logger=none", f"hydra.run.dir={tmp_path}/evaluation")
    assert accuracy(evaluated) == accuracy(out)
    assert (tmp_path / "evaluation" / "metrics.csv").exists()

    _, err = run(f"ckpt_path='{folder}'", "data.batch_size=64", code=1)
    assert "had data.batch_size=32, this one has 64" in one_line(err)
    rows = (folder / "metrics.csv").read_text().splitlines()
    alone = ["trainer.devices=1", "strategy=auto", "trainer.max_epochs=3", "logger=none"]
    continued, err = run(f"ckpt_path='{folder}'", *alone)
    assert "conf/ has changed" not in err
    assert str(folder) in continued
    longer = (folder / "metrics.csv").read_text().splitlines()
    assert longer[: len(rows) - 1] == rows[:-1]
    assert [int(row.split(",")[0]) for row in longer[1:]][-1] == 3 * 11
    assert OmegaConf.load(folder / "config.yaml").run_id == folder.name

    _, err = run(f"ckpt_path='{folder}'", "model=resnet9", *alone, code=1)
    assert "another network than this run's `model`" in one_line(err)
    whole = (folder / "checkpoints" / "last.ckpt").read_bytes()
    (folder / "checkpoints" / "last.ckpt").write_bytes(whole[:-2000])
    _, err = run(f"ckpt_path='{folder}/checkpoints/last.ckpt'", code=1)
    assert "is no whole checkpoint" in one_line(err)


def test_under_torchrun_rank_zero_decides(small: list[str], tmp_path: Path) -> None:
    arguments = [
        *small,
        *TINY,
        "logger=none",
        "trainer.devices=2",
        "strategy=ddp",
        "hydra.run.dir=${run_folder:" + f"{tmp_path}" + ",null,true}",
    ]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")
    out, _ = run(*arguments, program=torchrun)
    assert out.count("done: ") == 1
    (folder,) = tmp_path.iterdir()
    assert (folder / "logs" / "rank1.log").is_file()
    _, err = run(*arguments, "trainer.devices=4", program=torchrun, code=1)
    assert "2 processes were started, but trainer.devices x trainer.num_nodes is 4" in err


def test_under_slurm_rank_zero_decides(small: list[str], tmp_path: Path) -> None:
    """Two tasks as srun would start them, told what they are by its variables alone."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    job = {"SLURM_NTASKS": 2, "SLURM_NNODES": 1, "SLURM_NODEID": 0, "SLURM_JOB_ID": 7, "SLURM_JOB_NAME": "train"}
    job |= {"SLURM_NTASKS_PER_NODE": 2, "SLURM_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    arguments = [*small, *TINY, "logger=none", "trainer.devices=2", "strategy=ddp"]
    runs = "hydra.run.dir=${run_folder:" + f"{tmp_path},null,true" + "}"
    tasks = []
    for rank in range(2):
        variables = {name: str(value) for name, value in (job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}).items()}
        tasks.append(start(*arguments, runs, program=("train.py",), **variables))
    printed = [task.communicate(timeout=200) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], printed
    assert "done: " in printed[0][0]
    assert "done: " not in printed[1][0]
    (folder,) = tmp_path.iterdir()
    assert {file.name for file in (folder / "logs").iterdir()} == {"rank0.log", "rank1.log"}


def test_a_sweep_gives_each_job_its_own(small: list[str], tmp_path: Path) -> None:
    sweep = ["-m", "trainer.devices=1,2", "strategy=ddp", f"hydra.sweep.dir={tmp_path}/sweep", "logger=none"]
    run(*sweep, *small, *TINY)
    finals = [torch.load(tmp_path / "sweep" / job / "checkpoints" / "last.ckpt")["state_dict"] for job in "01"]
    for name, tensor in finals[0].items():
        assert torch.allclose(finals[1][name], tensor, rtol=1e-3, atol=1e-4), name
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["0", "1", "multirun.yaml", "sweep.csv"]


@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_killed_and_resumed_is_the_same_run(victim: str, small: list[str], tmp_path: Path) -> None:
    """SIGKILL after some checkpoint of two ranks; resumed on one; float64 weights as of the run left alone."""
    task = [
        *small,
        "experiment=parity",
        "logger=none",
        "trainer.accelerator=cpu",
        "callbacks.checkpoint.every_n_train_steps=1",
    ]
    run(*task, f"hydra.run.dir={tmp_path}/whole")
    folder = tmp_path / "killed"
    process = start(*task, "strategy=ddp", "trainer.devices=2", f"hydra.run.dir={folder}")
    try:
        deadline = time.monotonic() + 120
        while _rows(folder) < 7 and time.monotonic() < deadline:
            time.sleep(0.02)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        os.kill(process.pid if victim == "launcher" else _last_rank(children), signal.SIGKILL)
        process.wait(timeout=60)
        time.sleep(1)
    finally:
        left = _kill_group(process.pid)
    assert not left, "processes left running"
    assert 0 < _rows(folder) < 22
    run(f"ckpt_path={folder}", "strategy=auto", "trainer.devices=1")
    whole, resumed = (
        torch.load(place / "checkpoints" / "last.ckpt")["state_dict"] for place in (tmp_path / "whole", folder)
    )
    for name, tensor in whole.items():
        assert torch.allclose(resumed[name], tensor, rtol=1e-9, atol=1e-9), name
    steps = [int(row.split(",")[0]) for row in (folder / "metrics.csv").read_text().splitlines()[1:]]
    assert steps == [*range(20), 20]


def _rows(folder: Path) -> int:
    file = folder / "metrics.csv"
    return file.read_text().count("\n") if file.exists() else 0


def _last_rank(children: list[str]) -> int:
    """The process of the highest rank: the others are the resource tracker and the ranks below."""
    ranks = [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    return ranks[-1]
