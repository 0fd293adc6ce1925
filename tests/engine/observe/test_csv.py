"""metrics.csv has one row per step, is complete at every moment, and is cut and continued on resumption."""

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from onecurve.observe.csv import CSVLogger
from onecurve.records.events import logged_steps
from tests.support.comparison import read_rows


def test_writes_one_row_per_step_immediately(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({"runtime": 1})
    logger.log_metrics({"loss": 0.1}, step=1)
    assert read_rows(tmp_path) == [{"step": "1", "epoch": "", "loss": "0.1"}]
    logger.log_metrics({"loss": 0.2, "epoch": 0}, step=2)
    logger.log_metrics({"acc": 0.5}, step=2)
    assert read_rows(tmp_path)[1] == {"step": "2", "epoch": "0", "loss": "0.2", "acc": "0.5"}
    assert (tmp_path / "config.yaml").read_text() == "runtime: 1\n"


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
    assert read(tmp_path).endswith(left)  # the disk may be full as the run starts
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
    assert [row["other"] for row in read_rows(tmp_path)] == ["", "2.0"]
    assert logged_steps(tmp_path) == 5
    again = CSVLogger(tmp_path)
    again.cut(4)
    again.log_metrics({"loss": 0.3}, step=5)
    assert [row["step"] for row in read_rows(tmp_path)] == ["0", "5"]


def test_a_tensor_is_a_number_in_one_row(tmp_path: Path) -> None:
    """A module may log what it has, also of a test; those of a tensor with several values are a list."""
    metrics: Any = {"test/loss": torch.tensor(0.5), "of": torch.ones(2)}
    logger = CSVLogger(tmp_path)
    for _ in range(2):
        logger.log_metrics(metrics, step=4)
    assert read_rows(tmp_path) == [{"step": "4", "epoch": "", "test/loss": "0.5", "of": "[1.0, 1.0]"}]


def test_calls_to_its_experiment_do_nothing(tmp_path: Path) -> None:
    CSVLogger(tmp_path).experiment.add_image("first", None, 0)


@pytest.fixture
def not_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)


def read(folder: Path) -> str:
    return (folder / "metrics.csv").read_bytes().decode()  # its line ends are not translated


def test_other_ranks_write_nothing(tmp_path: Path, not_rank_zero: None) -> None:
    text = "step,epoch,loss\n1,0,0.5\n2,0"  # of the last line the first rank has written a part
    (tmp_path / "metrics.csv").write_text(text)
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({"runtime": 1})
    logger.log_metrics({"loss": 0.1}, step=2)
    logger.cut(0)
    assert read(tmp_path) == text
    assert not (tmp_path / "config.yaml").exists()


def test_its_name_is_that_of_the_folder(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "run")
    assert (logger.name, logger.version, logger.save_dir) == ("run", "", str(tmp_path / "run"))
    assert logger.log_dir == logger.save_dir


def test_the_configuration_keeps_its_order(tmp_path: Path) -> None:
    """Its folder and those above it may not exist yet, or exist."""
    logger = CSVLogger(tmp_path / "runs" / "run")
    logger.log_hyperparams({"seed": 1, "runtime": {}})
    logger.log_hyperparams({"seed": 2, "runtime": {}})
    logger.log_hyperparams({"lr": 1})  # those of a module
    assert (tmp_path / "runs" / "run" / "config.yaml").read_text() == "seed: 2\nruntime: {}\n"


@pytest.mark.parametrize(
    ("step", "left"),
    [
        (0, []),
        (1, []),
        (2, ["1,0,0.5"]),
        (3, ["1,0,0.5", "2,0,0.25"]),
        (300, ["1,0,0.5", "2,0,0.25"]),
        (301, ["1,0,0.5", "2,0,0.25", "300,1,"]),
        (1000, ["1,0,0.5", "2,0,0.25", "300,1,"]),
    ],
)
def test_cuts_the_rows_from_a_step_on(step: int, left: list[str], tmp_path: Path) -> None:
    before = "step,epoch,loss\n1,0,0.5\n2,0,0.25\n300,1,\n"
    (tmp_path / "metrics.csv").write_text(before)
    logger = CSVLogger(tmp_path)
    logger.cut(step)
    logger.cut(step)  # a fit that ended before its first row, and the next one
    assert read(tmp_path) == before  # the run may still be refused
    inode = (tmp_path / "metrics.csv").stat().st_ino
    logger.log_metrics({"loss": 9.0}, step=2000)
    assert read(tmp_path).splitlines() == ["step,epoch,loss", *left, "2000,,9.0"]
    assert ((tmp_path / "metrics.csv").stat().st_ino == inode) is (len(left) == 3), "appended, if no row is cut"


def test_a_cut_of_no_file_makes_none(tmp_path: Path) -> None:
    CSVLogger(tmp_path).cut(0)
    assert list(tmp_path.iterdir()) == []


def test_rows_are_appended_if_they_have_no_new_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that another program adds shows which writes replace the file."""
    logger, file = CSVLogger(tmp_path), tmp_path / "metrics.csv"
    logger.log_metrics({"epoch": 0, "loss": 0.5}, step=1)
    file.write_text(f"{file.read_text()}other\n")
    logger.log_metrics({"epoch": 1, "loss": 0.25}, step=2)
    assert read(tmp_path) == "step,epoch,loss\n1,0,0.5\nother\n2,1,0.25\n"
    logger.log_metrics({"epoch": 0}, step=2)
    assert read(tmp_path) == "step,epoch,loss\n1,0,0.5\n2,0,0.25\n", "a row that is known is written again"
    file.write_text("other\n")
    logger.log_metrics({"acc": 0.75}, step=3)
    assert read(tmp_path) == "step,epoch,loss,acc\n1,0,0.5,\n2,0,0.25,\n3,,,0.75\n"
    file.unlink()
    logger.log_metrics({"acc": 1.0}, step=4)
    assert read(tmp_path) == "step,epoch,loss,acc\n1,0,0.5,\n2,0,0.25,\n3,,,0.75\n4,,,1.0\n"


def test_metrics_of_a_large_step_share_a_row(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 0.5}, step=int("70000"))
    logger.log_metrics({"acc": 0.25}, step=int("70000"))
    logger.log_metrics({"other": 1.0})
    assert read(tmp_path) == "step,epoch,loss,acc,other\n70000,,0.5,0.25,1.0\n"
    logger.log_metrics({"loss": 0.5}, step=0)
    assert read(tmp_path).splitlines()[1] == "0,,0.5,,"  # rows are in the order of the steps


def test_an_evaluation_of_an_earlier_checkpoint_joins_the_row_of_its_step(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for step in (10, 20, 30):
        logger.log_metrics({"loss": 0.5}, step=step)
    logger.log_metrics({"acc": 0.25}, step=20)
    assert read(tmp_path) == "step,epoch,loss,acc\n10,,0.5,\n20,,0.5,0.25\n30,,0.5,\n"


def test_two_tests_of_a_step_have_two_rows(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"epoch": 0, "loss": 0.5}, step=10)
    for epoch, loss in ((1, 0.25), (1, 0.125), (1, 0.125)):
        logger.log_metrics({"epoch": epoch, "test_loss": loss}, step=10)
    CSVLogger(tmp_path).log_metrics({"test_loss": 0.125}, step=10)  # again, in another process
    rows = "step,epoch,loss,test_loss\n10,1,0.5,0.25\n10,1,,0.125\n"
    assert read(tmp_path) == rows
    CSVLogger(tmp_path).log_metrics({"test_loss": 0.5}, step=10)
    assert read(tmp_path) == f"{rows}10,,,0.5\n"


def test_a_second_test_of_an_earlier_step_stands_beside_the_first(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for step in (10, 20):
        logger.log_metrics({"loss": 0.5, "test_loss": 0.25}, step=step)
    logger.log_metrics({"test_loss": 0.125}, step=10)
    logger.log_metrics({"loss": 0.75}, step=20)  # a validation again, rounded otherwise
    rows = "10,,0.5,0.25\n10,,,0.125\n20,,0.75,0.25\n"
    assert read(tmp_path) == f"step,epoch,loss,test_loss\n{rows}"


def test_rows_of_an_earlier_process_are_merged(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,epoch,loss\n1,0,0.5\n")
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"acc": 0.25}, step=1)
    assert read(tmp_path) == "step,epoch,loss,acc\n1,0,0.5,0.25\n"


@pytest.mark.parametrize("text", ["step,epoch,loss\n1,0,0.5\n", "step,epoch,loss\n"])
def test_a_complete_file_is_not_written_again(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    before = (tmp_path / "metrics.csv").stat().st_ino
    CSVLogger(tmp_path).log_metrics({"loss": 0.25}, step=2)
    assert (tmp_path / "metrics.csv").stat().st_ino == before
    assert read(tmp_path) == f"{text}2,,0.25\n"


def test_a_file_that_was_not_written_is_replaced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first write after a full disk has all rows, and the next one is appended."""
    logger, file = CSVLogger(tmp_path), tmp_path / "metrics.csv"
    logger.log_metrics({"loss": 0.5}, step=1)
    with monkeypatch.context() as full:
        full.setattr(Path, "open", Mock(side_effect=OSError("full")))
        logger.log_metrics({"loss": 0.5}, step=2)
    assert caplog.messages == ["metrics.csv lacks rows until it can be written; training continues: full"]
    logger.log_metrics({"loss": 0.5}, step=3)
    assert read(tmp_path) == "step,epoch,loss\n1,,0.5\n2,,0.5\n3,,0.5\n"
    file.write_text("")
    logger.log_metrics({"loss": 0.5}, step=4)
    assert read(tmp_path) == "4,,0.5\n"
