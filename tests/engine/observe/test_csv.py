"""metrics.csv has one row per step, is complete at every moment, and is cut and continued on resumption."""

import errno
from pathlib import Path
from typing import Any

import pytest

from onecurve.observe.csv import CSVLogger
from onecurve.utils.events import logged_steps
from tests.support.comparison import read_rows


def test_writes_one_row_per_step_immediately(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({"seed": 1})
    logger.log_metrics({"loss": 0.1}, step=1)
    assert read_rows(tmp_path) == [{"step": "1", "epoch": "", "loss": "0.1"}]
    logger.log_metrics({"loss": 0.2, "epoch": 0}, step=2)
    logger.log_metrics({"acc": 0.5}, step=2)
    assert read_rows(tmp_path)[1] == {"step": "2", "epoch": "0", "loss": "0.2", "acc": "0.5"}
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"


def test_continues_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 0.1}, step=1)
    with monkeypatch.context() as full:
        full.setattr(Path, "open", fail)
        for step in (2, 3):
            logger.log_metrics({"loss": 0.1}, step=step)
    assert caplog.text.count("metrics.csv lacks rows") == 1
    logger.log_metrics({"loss": 0.1}, step=4)
    assert [row["step"] for row in read_rows(tmp_path)] == ["1", "2", "3", "4"]


def test_resumes_after_a_kill(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path)
    for step in range(5):
        first.log_metrics({"loss": step / 10}, step=step)
    with (tmp_path / "metrics.csv").open("a") as stream:
        stream.write("5,")  # the process died while it wrote
    second = CSVLogger(tmp_path)
    second.cut(3)
    second.log_metrics({"loss": 9.0, "acc": 1.0}, step=3)
    assert [row["step"] for row in read_rows(tmp_path)] == ["0", "1", "2", "3"]
    assert read_rows(tmp_path)[2]["loss"] == "0.2"
    assert read_rows(tmp_path)[3]["acc"] == "1.0"


@pytest.mark.parametrize(("left", "steps"), [("10,0,1.0\n20,0,1.", [10, 30]), ("10", [30]), ("", [30])])
def test_drops_a_partial_line_of_a_killed_process(left: str, steps: list[int], tmp_path: Path) -> None:
    """A number at the end of a partial line may lack its last digits."""
    (tmp_path / "metrics.csv").write_text(f"step,epoch,train/loss\n{left}")
    logger = CSVLogger(tmp_path)
    logger.cut(20)
    logger.log_metrics({"epoch": 0, "train/loss": 9.0}, step=30)
    assert [int(row["step"]) for row in read_rows(tmp_path)] == steps


def test_a_row_without_a_step_is_that_of_the_last_one(tmp_path: Path) -> None:
    """A module may call `self.logger.log_metrics(...)`; an earlier version wrote no step then."""
    (tmp_path / "metrics.csv").write_text("step,epoch,loss\n,,0.5\n")
    assert logged_steps(tmp_path) is None
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"begin": 1.0})
    logger.log_metrics({"loss": 0.1}, step=4)
    logger.log_metrics({"other": 2.0})
    assert [row["step"] for row in read_rows(tmp_path)] == ["0", "4"]
    assert logged_steps(tmp_path) == 5
    CSVLogger(tmp_path).cut(4)
    assert [row["step"] for row in read_rows(tmp_path)] == ["0"]


def test_calls_to_its_experiment_do_nothing(tmp_path: Path) -> None:
    CSVLogger(tmp_path).experiment.add_image("first", None, 0)
