"""The starts and ends of a run; tests/engine/faults and tests/engine/launch check them in runs that end in each way."""

import multiprocessing as mp
import time
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from onecurve.errors import RankFailedError, UserError
from onecurve.launch.outcome import run_lifecycle
from onecurve.process.signals import Stopped
from onecurve.records.events import append_end, append_event, read_events


def config(folder: Path) -> DictConfig:
    return OmegaConf.create({"run_dir": str(folder), "report": False, "doctor": False})


def names(folder: Path) -> list[str]:
    return [event["event"] for event in read_events(folder)]


def test_a_start_without_an_end_is_a_kill_at_the_last_sign_of_life(tmp_path: Path) -> None:
    append_event(tmp_path, "start", 0, world_size=2)
    (tmp_path / "metrics.csv").write_text("step,epoch,loss,test/loss\n9,0,1.5,\n19,0,1.0,\n20,0,,1.0\n2")
    with run_lifecycle(config(tmp_path)):
        append_event(tmp_path, "resume", 10)
    start, killed, resume = read_events(tmp_path)
    assert start == {"time": start["time"], "event": "start", "step": 0, "reason": None, "world_size": 2}
    assert killed | {"time": 0} == {"time": 0, "event": "killed", "step": 20, "reason": "no end was recorded"}
    assert start["time"] <= killed["time"] <= resume["time"]
    assert abs(killed["time"] - (tmp_path / "metrics.csv").stat().st_mtime) < 1e-3


def test_an_error_before_the_start_is_not_the_end_of_an_earlier_process(tmp_path: Path) -> None:
    append_event(tmp_path, "start", 0)
    with pytest.raises(UserError), run_lifecycle(config(tmp_path)):
        raise UserError("data.batch_size=130 is not divisible")
    assert [(event["event"], event["reason"]) for event in read_events(tmp_path)] == [
        ("start", None),
        ("killed", "no end was recorded"),
    ]


def _start(folder: Path, seconds: float) -> None:
    with run_lifecycle(config(folder)):
        (folder / "began").touch()
        time.sleep(seconds)


def test_refuses_a_second_start_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onecurve.launch.outcome._LOCK_TIMEOUT", 0.2)
    first = mp.get_context("fork").Process(target=_start, args=(tmp_path, 100))
    first.start()
    while not (tmp_path / "began").exists():
        time.sleep(0.05)
    with pytest.raises(UserError, match="another start of this run is in progress"):
        _start(tmp_path, 0)
    first.kill()
    first.join()
    _start(tmp_path, 0)


def test_a_line_that_a_kill_has_cut_is_ignored(tmp_path: Path) -> None:
    append_event(tmp_path, "start", 0)
    with (tmp_path / "events.jsonl").open("a") as stream:
        stream.write('{"time": 17')
    assert names(tmp_path) == ["start"]
    append_event(tmp_path, "resume", 5)
    assert names(tmp_path) == ["start", "resume"]


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run goes on, and one that fails keeps its own error."""
    (tmp_path / "events.jsonl").mkdir()
    append_event(tmp_path, "start", 0)
    append_event(tmp_path, "finished", 8)
    with pytest.raises(UserError, match="cannot write the checkpoint"), run_lifecycle(config(tmp_path)):
        raise UserError("cannot write the checkpoint")
    assert caplog.text.count("events.jsonl lacks an event: [Errno 21] Is a directory") == 2


def test_an_end_is_recorded_once(tmp_path: Path) -> None:
    append_end(tmp_path, "failed", "before the start")
    assert names(tmp_path) == []
    append_event(tmp_path, "start", 0)
    append_event(tmp_path, "stopped", 7, "SIGTERM")
    append_end(tmp_path, "failed", "the launcher's view")
    assert names(tmp_path) == ["start", "stopped"]


@pytest.mark.parametrize(
    ("error", "event", "reason"),
    [
        (Stopped(15), "stopped", "SIGTERM"),
        (KeyboardInterrupt(), "stopped", "SIGINT"),
        (UserError("train/loss is nan"), "failed", "train/loss is nan"),
        (ValueError("no\nsuch layer"), "failed", "ValueError: no"),
        (ValueError(), "failed", "ValueError: "),
        (RankFailedError("rank 1 failed (ValueError: no)\n  File"), "failed", "rank 1 failed (ValueError: no)"),
        (RankFailedError("rank 1 died (SIGKILL)", dead_rank=1), "killed", "rank 1 died (SIGKILL)"),
    ],
)
def test_reasons_are_one_line(error: BaseException, event: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        run_and_end_by(error, tmp_path)
    last = read_events(tmp_path)[-1]
    assert (last["event"], last["reason"]) == (event, reason)


def run_and_end_by(error: BaseException, folder: Path) -> None:
    with run_lifecycle(config(folder)):
        append_event(folder, "start", 0)
        raise error
