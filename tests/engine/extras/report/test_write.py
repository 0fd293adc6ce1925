"""When and where a page is written, and that it changes nothing else."""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from onecurve.extras.jobs import Job
from onecurve.extras.report import write_page_of
from onecurve.extras.report.run_page import write_run_page
from onecurve.launch.outcome import run_lifecycle
from onecurve.records.events import append_event
from scripts.report import main, write
from tests.support.commands import ROOT
from tests.support.run_folders import write_run


def config(folder: Path, **options: bool) -> DictConfig:
    return OmegaConf.create({"run_dir": str(folder), "report": True, "doctor": False} | options)


def test_written_after_an_error(tmp_path: Path) -> None:
    page = write_run(tmp_path / "run") / "report.html"
    with suppress(KeyError), run_lifecycle(config(page.parent)):
        raise KeyError("of the run")
    assert page.is_file()


@pytest.mark.parametrize("options", [{"report": False}, {"doctor": True}], ids=str)
def test_not_written(tmp_path: Path, options: dict[str, bool]) -> None:
    folder = write_run(tmp_path / "run")
    with run_lifecycle(config(folder, **options)):
        pass
    empty = tmp_path / "empty"
    empty.mkdir()
    with run_lifecycle(config(empty)):  # refused before it has logged anything
        pass
    assert not list(tmp_path.rglob("report.html"))


@pytest.mark.parametrize("part", ["onecurve.extras.report.write_page_of", "onecurve.extras.jobs.is_sweep"])
def test_an_error_of_the_report_is_one_line(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: Path) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr(part, fail)
    with pytest.raises(KeyError, match="of the run"), run_lifecycle(config(write_run(tmp_path / "run"))):
        raise KeyError("of the run")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in lines] == ["warning: no report.html (ValueError: two lines)"]


def test_without_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in list(sys.modules):
        if name.startswith(("plotly", "onecurve.extras.report.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)  # as if it were not installed
    with run_lifecycle(config(write_run(tmp_path / "run"))):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"no report.html: .*plotly.*; pip install '.\[report\]', or set report=false", line)


def test_runs_and_jobs_share_plotly(tmp_path: Path) -> None:
    write_page_of(write_run(tmp_path / "run"))
    job = write_run(tmp_path / "sweep" / "0")
    Job(["seed=0"]).write(job)
    for folder, link in ((job, "../../.plotly-"), (tmp_path / "sweep", "../.plotly-")):
        assert f'<script src="{link}' in write_page_of(folder).read_text()
    write_page_of(tmp_path / "run" / "evaluation" / "..")
    assert len(list(tmp_path.rglob(".plotly-*.js"))) == 1


def test_plotly_is_in_the_page_where_it_cannot_be_beside_it(tmp_path: Path) -> None:
    page = write_run_page(write_run(tmp_path / "run"), tmp_path / "missing").read_text()
    assert "<script src" not in page
    assert len(page) > 1e6


def test_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    attack = "</script><script>alert(1)</script>"
    folder = write_run(tmp_path / "<b>$title")
    evaluation = json.loads((folder / "evaluation" / "test.json").read_text())
    evaluation["classes"][0] = attack
    (folder / "evaluation" / "test.json").write_text(json.dumps(evaluation))
    reason = f"{attack} no file \udce4.csv"  # the name of a file that is not UTF-8
    append_event(folder, "failed", 3, reason, 1.9e9, command=[attack])
    metrics = folder / "metrics.csv"
    metrics.write_text(metrics.read_text().replace("optim/grad_norm", attack))
    page = write_page_of(folder).read_text()
    assert "alert(1)" in page
    assert "no file ?.csv" in page
    assert "<h1>&lt;b&gt;$title</h1>" in page
    assert attack not in page


def test_a_thousand_classes(tmp_path: Path) -> None:
    folder, classes = write_run(tmp_path / "run"), [str(number) for number in range(1000)]
    evaluation = {"step": 1, "classes": classes, "confusion": np.eye(1000, dtype=int).tolist()}
    (folder / "evaluation" / "test.json").write_text(json.dumps(evaluation))
    page = write_page_of(folder)
    assert page.stat().st_size < 1e6
    assert page.read_text().count('<td class="number" data-value="1.0">') == 20


def page_of_metrics(folder: Path, metrics: str) -> str:
    """Return the page of a folder that has a metrics.csv alone."""
    folder.mkdir()
    (folder / "metrics.csv").write_text(metrics)
    return write_page_of(folder).read_text()


def test_nothing_but_the_configuration(tmp_path: Path) -> None:
    """A run that failed before its first log point."""
    page = page_of_metrics(tmp_path / "run", "step,train/loss\n")
    assert "No metric was logged." in page
    assert "Ranks" not in page


def test_a_run_of_one_row(tmp_path: Path) -> None:
    page = page_of_metrics(tmp_path / "run", "step,epoch,train/loss,val/loss,lr\n0,0,2.5,2.25,0.125\n")
    assert "Logged once" in page
    assert all(f">{value}</td>" in page for value in (2.5, 2.25, 0.125))


def test_not_a_number_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", cells={"train/loss": float("nan"), "lr": float("inf")})
    page = write_page_of(folder).read_text()
    assert "train/loss is not finite at 1 points, first at step 300" in page
    assert "lr is not finite at 1 points" in page


@pytest.mark.slow
def test_a_hundred_thousand_log_points_are_below_5_megabytes(tmp_path: Path) -> None:
    assert write_page_of(write_run(tmp_path / "long", points=100_000)).stat().st_size < 5_000_000


def run_command(words: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run `scripts.report` in this process; return what it prints."""
    monkeypatch.setattr("sys.argv", ["report", *words])
    main()
    return capsys.readouterr().out.strip()


def test_commands_of_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every line of docs/reports.md; the folders in its words are copies of two runs and a sweep."""
    page = (ROOT / "docs" / "reports.md").read_text()
    commands = re.findall(r"^python -m scripts.report (.*)$", page, re.MULTILINE)
    assert len(commands) == 6
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", gap=1e-6)
    Job(["seed=0"]).write(write_run(tmp_path / "sweep" / "0"))
    for words in commands:
        for word in ("runs/single", "RUN_DIR"):
            words = words.replace(word, str(first), 1)
        for word in ("RUN_DIR", "runs/ddp", "runs/pipeline"):
            words = words.replace(word, str(second))
        words = words.replace("SWEEP_DIR", f"{tmp_path}/sweep").replace("pair.html", f"{tmp_path}/pair.html")
        file = Path(run_command(words.split(), monkeypatch, capsys))
        assert file.is_relative_to(tmp_path)
        text = file.read_text()
        assert ("parts from first at step" in text) == (str(second) in words)
        assert (len(text) > 4_000_000) == ("--single-file" in words)


def test_files_beside_run_folders_are_left_out(tmp_path: Path) -> None:
    """Such as the comparison that the command wrote before: a shell expands runs/* to it."""
    run, page = write_run(tmp_path / "run"), tmp_path / "comparison.html"
    page.touch()
    assert write([run, page], None, single_file=False) == run / "report.html"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{tmp}/no", "error: {tmp}/no is no run folder: it has no metrics.csv"),
        ("{tmp}/sweep --output=a", "error: --output=a is for a comparison, of several run folders"),
        ("{tmp}/sweep {tmp}/sweep", "error: {tmp}/sweep is a sweep: give it alone, or its run folders"),
        ("{job} {job} --output={tmp}/no/a.html", "error: --output={tmp}/no/a.html: there is no folder {tmp}/no"),
        ("{job} {job} --output={job}", "error: --output={job} cannot be written (Is a directory): give another file"),
    ],
)
def test_errors_of_the_command(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_run(tmp_path / "sweep" / "0")
    Job(["seed=0"]).write(job)
    with pytest.raises(SystemExit) as end:
        run_command(words.format(tmp=tmp_path, job=job).split(), monkeypatch, capsys)
    assert end.value.code == message.format(tmp=tmp_path, job=job)
