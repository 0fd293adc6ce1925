"""The real command line: its output, its files and its errors.

Starting processes costs seconds, so few tests do, and those check much. Errors that one process finds are tested inside
the test process.
"""

import re
import resource
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from onecurve.config.command_line import complete_overrides
from onecurve.records.events import read_events
from tests.support.commands import (
    TINY,
    TORCHRUN,
    TWO,
    callback,
    error_line,
    run,
    run_here,
    run_in_terminal,
    steps,
)


def test_help_is_complete_and_imports_nothing_heavy() -> None:
    """It takes half a second, and only an import could make it slow."""
    watched = (
        "import atexit, runpy, sys; sys.argv[0] = 'train.py'; sys.path.insert(0, '');"
        "atexit.register(lambda: print('heavy:', {'torch', 'lightning', 'wandb', 'numpy'} & set(sys.modules)));"
        "runpy.run_path('train.py', run_name='__main__')"
    )
    out, _ = run("--help", program=("-c", watched))
    assert "heavy: set()" in out
    assert all(hint in out for hint in ("strategy", "ddp_spawn", "ckpt_path", "data=shapes", "fit=false", "debug"))


def test_error_of_a_single_rank_is_one_line(small: list[str], tmp_path: Path) -> None:
    _, err = run_here(*small, *TINY, "logger=none", f"run_dir={tmp_path}/run", "optimizer.lr=1e30", code=1)
    assert all(hint in error_line(err) for hint in ("train/loss is nan", "optimizer.lr", "run/checkpoints"))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("ddp_spawn", 3)])
def test_user_errors_found_by_several_ranks(strategy: str, devices: int, small: list[str], tmp_path: Path) -> None:
    """Only rank zero prints the error, in one line."""
    ranks = [f"strategy={strategy}", f"trainer.devices={devices}", "trainer.accumulate_grad_batches=4"]
    _, err = run(*small, *TINY, "logger=none", f"run_dir={tmp_path}/run", *ranks, "data.batch_size=30", code=1)
    assert "data.batch_size=28 or 32" in error_line(err)


def test_full_disk_is_a_one_line_error(small: list[str], tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: writing fails in the same place."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
    try:
        _, err = run_here(*small, *TINY, "logger=none", "report=true", f"hydra.run.dir={tmp_path}/run", code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write the checkpoint" in error_line(err)
    assert "warning: no report.html (OSError: [Errno 27] File too large)" in err
    assert f"ckpt_path={tmp_path}/run" in error_line(err)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    last = read_events(tmp_path / "run")[-1]
    assert last["event"] == "failed"
    assert "cannot write the checkpoint" in last["reason"]


def test_an_error_in_the_users_code_has_a_short_traceback(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from src.models.classifier import ImageClassifier\n"
        "class Mine(ImageClassifier):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        raise ValueError('here')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    arguments = [*small, *TINY, "logger=none", "module._target_=mine.Mine", "trainer.enable_progress_bar=false"]
    _, err = run_here(*arguments, f"run_dir={tmp_path}/run", code=1)
    log = tmp_path / "run" / "logs" / "rank0.log"
    header, folded, *last = err.splitlines()[-6:]
    assert header == "Traceback (most recent call last):"
    assert folded == "  ... frames of libraries and of onecurve ..."
    assert last == [
        f'  File "{tmp_path}/mine.py", line 4, in training_step',
        "    raise ValueError('here')",
        "ValueError: here",
        f"full traceback: {log}",
    ]
    assert "training_epoch_loop.py" in log.read_text()
    monkeypatch.setattr("onecurve.application.TRACEBACK_WANTED", True)
    with pytest.raises(ValueError, match="here"):
        run_here(*arguments, f"run_dir={tmp_path}/full")


def test_shows_the_error_of_the_rank_that_failed_first(small: list[str], tmp_path: Path) -> None:
    """Rank one raises, and the line that does is shown; the lost connection of rank zero is not."""
    arguments = [*small, *TINY, "logger=none", *TWO, callback("RaiseOnRankOne")]
    _, err = run_here(*arguments, f"hydra.run.dir={tmp_path}/run", code=1)
    assert "rank 1 failed" in err
    assert "RuntimeError: only here" in err
    assert "Traceback" in err
    assert "support/callbacks.py" in err
    assert "rank1.log" in err
    assert len(err[err.index("error: rank 1") :].splitlines()) < 8
    assert "training_epoch_loop.py" in (tmp_path / "run" / "logs" / "rank1.log").read_text()
    assert read_events(tmp_path / "run")[-1]["reason"].startswith("rank 1 failed (RuntimeError: only here)")


@pytest.mark.slow
def test_a_rank_that_raises_ends_all_under_torchrun(small: list[str], tmp_path: Path) -> None:
    """The other rank waits for it in a collective."""
    arguments = [*small, *TINY, "logger=none", *TWO, callback("RaiseOnRankOne"), f"run_dir={tmp_path}/run"]
    before = time.monotonic()
    _, err = run(*arguments, program=TORCHRUN, code=1)
    assert time.monotonic() - before < 60
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: rank 1 failed (RuntimeError: only here); its log is {tmp_path}/run/logs/rank1.log"]
    assert "Traceback" in (tmp_path / "run" / "logs" / "rank1.log").read_text()


@pytest.mark.slow
def test_user_error_after_the_rendezvous_is_one_line_under_torchrun(small: list[str], tmp_path: Path) -> None:
    """All ranks raise it when the process group is open; rank zero must print it before torchrun ends all ranks."""
    arguments = [*small, *TINY, *TWO, "data.batch_size=63", "trainer.accumulate_grad_batches=2", "logger=none"]
    arguments.append(f"run_dir={tmp_path}/run")
    _, err = run(*arguments, program=TORCHRUN, code=1)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]  # torchrun prints a traceback of its own
    assert len(lines) == 1, err[-3000:]
    assert "data.batch_size=63 does not divide over 2 micro-batches" in lines[0]
    assert "FileNotFoundError" not in err
    assert not (tmp_path / "run").exists()


def test_run_from_start_to_evaluation(small: list[str], tmp_path: Path) -> None:
    """Train two ranks with wandb, check the run folder, evaluate and continue it, and try another network."""
    folder = tmp_path / "run with space"
    (tmp_path / "images").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "images" / "black.png")
    task = [*small, *TINY, *TWO, f"predict={tmp_path}/images"]
    out, err = run(*task, f"hydra.run.dir='{folder}'", WANDB_MODE="offline")
    assert "Traceback" not in err
    assert ".py:" not in out + err, "no warning"
    assert "\x1b" not in out + err, "no colors in a pipe"
    assert out.count("ddp, 2 processes on cpu, 32-true") == 1
    banner = out.partition("\nwandb is offline")[0].splitlines()
    assert banner[0].startswith(f"  changes        {small[0]}"), "before what the loggers print"
    assert [line.split("  ")[1] for line in banner[-8:-6]] == ["experiment", "virtual ranks"]
    assert banner[-7].endswith("4, computed together")
    assert len(banner) <= 12
    assert all(len(line) <= 80 for line in banner if str(tmp_path) not in line)
    for fact in ("32 = 2 x 1 micro-batches x 16 per device", "synthetic shapes", "after scaling", str(folder)):
        assert fact in out
    assert re.search(rf"^test/.*test/acc.*\ndone: everything is in\n{folder}$", out, re.MULTILINE)
    assert f"\nwandb sync {folder}/wandb/offline-*\n" in out, "no break inside the path"
    for name in ("config.yaml", "metrics.csv", "checkpoints/last.ckpt", "logs/rank0.log", "logs/rank1.log"):
        assert (folder / name).is_file()
    assert len(list((folder / "wandb").glob("offline-run-*/*.wandb"))) == 1
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(name.startswith("net.") for name in checkpoint["state_dict"])
    assert "strategy:" in checkpoint["config"]

    def accuracy(printed: str) -> str:
        return re.findall(r"test/acc ([\d.]+)", printed)[-1]

    runtime = OmegaConf.load(folder / "config.yaml").runtime
    run_id = runtime.run_id
    assert (runtime.group, runtime.job_type) == (run_id, "train")
    alone = ["trainer.devices=1", "strategy=auto", "logger=none"]
    evaluated, _ = run_here("fit=false", f"ckpt_path='{folder}'", *alone, f"hydra.run.dir={tmp_path}/evaluation")
    assert accuracy(evaluated) == accuracy(out)
    assert (tmp_path / "evaluation" / "metrics.csv").exists()
    evaluation = OmegaConf.load(tmp_path / "evaluation" / "config.yaml").runtime
    assert (evaluation.group, evaluation.job_type) == (run_id, "eval"), "W&B shows it with its run"

    _, err = run_here(f"ckpt_path='{folder}'", "data.batch_size=64", *alone, code=1)
    assert "had data.batch_size=32 (now 64)" in error_line(err)
    rows = (folder / "metrics.csv").read_text().splitlines()
    continued, err = run_here(f"ckpt_path='{folder}'", "trainer.max_epochs=3", *alone)
    assert f"{folder}/checkpoints/last.ckpt, step 22" in continued
    longer = (folder / "metrics.csv").read_text().splitlines()
    assert longer[: len(rows) - 1] == rows[:-1]
    assert [int(row.split(",")[0]) for row in longer[1:]][-1] == 3 * 11
    assert OmegaConf.load(folder / "config.yaml").runtime.run_id == run_id

    _, err = run_here(f"ckpt_path='{folder}'", "model=resnet9", *alone, code=1)
    assert "another network than this run's `model`" in error_line(err)
    content = (folder / "checkpoints" / "last.ckpt").read_bytes()
    (folder / "checkpoints" / "last.ckpt").write_bytes(content[:-2000])
    _, err = run_here(f"ckpt_path='{folder}/checkpoints/last.ckpt'", code=1)
    assert "is not a complete checkpoint" in error_line(err)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_spawn"])
def test_breakpoint_stops_rank_zero_in_the_terminal(strategy: str, small: list[str], tmp_path: Path) -> None:
    """The other ranks wait for it in their next collective."""
    devices = 1 if strategy == "auto" else 2
    task = [*small, *TINY, "logger=none", "test=false", f"strategy={strategy}", f"trainer.devices={devices}"]
    typed = "print('rank', trainer.global_rank, trainer.global_step + 40)\ncontinue\n"
    folder = f"run_dir={tmp_path}/run"
    code, printed = run_in_terminal(*task, callback("Breakpoint"), folder, columns=80, typed=typed)
    assert code == 0, printed
    assert printed.count("rank 0 42") == 1, printed
    assert steps(tmp_path / "run") == list(range(22))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_spawn"])
def test_terminal_shows_only_lines_of_the_project(strategy: str, small: list[str], tmp_path: Path) -> None:
    task = [*small, *TINY, f"strategy={strategy}", f"trainer.devices={1 if strategy == 'auto' else 2}"]
    code, printed = run_in_terminal(*task, f"run_dir={tmp_path}/run", columns=80)
    assert code == 0, printed
    banner = ["changes", "experiment", "virtual ranks", "strategy", "batch", "data", "learning rate", "network"]
    banner += ["run folder", "data.", "model."]  # the last two begin further lines of changes
    results = ["Epoch", "Validation", "Testing", "throughput", "train/", "val/", "test/", "done: "]
    measured = ["rank", "if it were as fast as the median", "peak_memory_mib", "samples_per_sec", "step_ms"]
    measured += ["data_fraction", "gflop_per_step"]
    known = (*banner, *results, *measured, "wandb is offline", "wandb leet", "wandb sync", str(tmp_path))
    lines = [line for line in printed.splitlines() if line.strip()]
    assert [line for line in lines if not line.strip().startswith(known)] == []


def test_rank_zero_configures_all_ranks_under_torchrun(small: list[str], tmp_path: Path) -> None:
    new_folder = "hydra.run.dir=${run_folder:" + f"{tmp_path}" + ",new}"
    arguments = [*small, *TINY, "logger=none", *TWO, new_folder]
    out, _ = run(*arguments, program=TORCHRUN)
    assert out.count("done: ") == 1
    (folder,) = tmp_path.iterdir()
    assert (folder / "logs" / "rank1.log").is_file()


@pytest.mark.slow
def test_refuses_another_number_of_processes_under_torchrun(small: list[str], tmp_path: Path) -> None:
    _, err = run(*small, *TINY, *TWO, "trainer.devices=4", f"run_dir={tmp_path}/run", program=TORCHRUN, code=1)
    assert "2 processes were started, but trainer.devices x trainer.num_nodes is 4" in err


@pytest.mark.parametrize(
    ("word", "completed"),
    [
        ("init_from=runs/lr=0.5/last.ckpt", "init_from='runs/lr=0.5/last.ckpt'"),
        ("init_from='runs/lr=0.5/last.ckpt'", "init_from='runs/lr=0.5/last.ckpt'"),
        ("data.root=a/b", "data.root=a/b"),
        ("+data.root=a=b", "+data.root='a=b'"),
        ("tags=[a=b]", "tags=[a=b]"),
    ],
)
def test_paths_with_an_equals_sign_are_quoted(word: str, completed: str) -> None:
    assert complete_overrides([word]) == [completed]
