"""Readers of the files of a run folder, and what the pages compute from them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onecurve.extras.jobs import Job, Sweep
from onecurve.extras.report.comparison import labels
from onecurve.extras.report.metric_charts import BUCKETS, downsample, group_names, means, style_value_axis
from onecurve.extras.report.page import new_figure
from onecurve.extras.report.run_folder import Curve, RunFolder, read_metrics
from onecurve.extras.report.run_page import duration
from onecurve.records.events import append_event
from tests.support.run_folders import write_run

START = {"event": "start", "time": 100.0}


def curve(*values: float) -> Curve:
    return Curve(np.arange(len(values), dtype=float), np.array(values))


def test_metrics_without_a_value_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("step,train/loss,note,val/acc,empty\n0,nan,text,,\n1,inf,,0.5,\n,3,,,\n2,1.5,,0.6,\n3,1.2")
    curves = read_metrics(file)
    assert set(curves) == {"train/loss", "note", "val/acc"}
    assert curves["val/acc"].steps.tolist() == [1, 2]
    assert curves["train/loss"].finite().tolist() == [1.5]
    assert curves["note"].finite().tolist() == []
    assert read_metrics(tmp_path / "missing.csv") == {}
    file.write_text("")
    assert read_metrics(file) == {}


def test_downsampling_keeps_each_spike() -> None:
    values = np.sin(np.linspace(0, 9, 100_001))
    values[[7, 50_003, 99_998]] = 5.0, -7.0, np.inf
    shown = downsample(Curve(np.arange(100_001.0), values))
    assert len(shown.values) <= 2 * BUCKETS + 2
    assert {5.0, -7.0} <= set(shown.values)
    assert shown.steps[0] == 0
    assert shown.steps[-1] == 100_000
    assert (np.diff(shown.steps) > 0).all()
    assert not np.isinf(shown.values).any()


def test_downsampling_keeps_a_short_curve_and_gaps() -> None:
    assert downsample(curve(1, 2, 3)).values.tolist() == [1, 2, 3]
    shown = downsample(Curve(np.arange(5000.0), np.full(5000, np.nan)))
    assert np.isnan(shown.values).all()


def test_means_of_sections() -> None:
    mean = means(curve(1, 3, np.nan, 5, np.inf, np.nan, 7), sections=4)
    assert mean.steps.tolist() == [0.5, 2.5, 4.5, 6]
    assert mean.values == pytest.approx([2, 5, np.nan, 7], nan_ok=True)


def test_charts_share_the_splits_of_a_metric() -> None:
    names = ["epoch", "train/loss", "lr-0", "val/loss", "lr-1", "ranks/busy_ms_max", "ranks/busy_ms_median", "other/x"]
    names += ["val_class/cat", "val_class/dog"]
    assert group_names(names) == {
        "loss": ["train/loss", "val/loss"],
        "lr": ["lr-0", "lr-1"],
        "ranks/busy_ms": ["ranks/busy_ms_max", "ranks/busy_ms_median"],
        "other/x": ["other/x"],
        "val_class": ["val_class/cat", "val_class/dog"],
    }


def test_logarithmic_axis_needs_a_wide_range_of_positive_values() -> None:
    for values, kind in (((1e-3, 1, np.inf), "log"), ((0.5, 1), None), ((0, 1e9), None), ((np.nan,), None)):
        style_value_axis(figure := new_figure(100), "val/loss", [curve(*values)])
        assert figure.layout.yaxis.type == kind


def test_runs_are_labeled_by_what_differs(tmp_path: Path) -> None:
    runs = [RunFolder(write_run(tmp_path / name)) for name in "ab"]
    assert labels(runs) == ["a", "b"]
    assert labels(runs[:1]) == ["pipeline × 2"]
    runs = [RunFolder(write_run(tmp_path / sweep / "0")) for sweep in ("first", "second")]
    assert labels(runs) == ["first/0", "second/0"]


def test_duration_leaves_out_the_time_without_a_process() -> None:
    events = [START, {"event": "killed", "time": 130.0}, {"event": "resume", "time": 500.0}]
    assert duration(events) == 30
    assert duration([*events, {"event": "finished", "time": 505.0}]) == 35
    lost = [START, {"event": "restart", "time": 130.0}]
    assert duration([*lost, {"event": "resume", "time": 500.0}, {"event": "finished", "time": 505.0}]) == 35
    assert duration([START]) is None


def test_end_of_a_run(tmp_path: Path) -> None:
    run = RunFolder(write_run(tmp_path / "run"))
    assert (run.status, run.strategy, run.world_size) == ("finished", "pipeline", 2)
    (tmp_path / "run" / "events.jsonl").unlink()
    run = RunFolder(tmp_path / "run")
    assert (run.status, run.strategy, run.world_size) == ("", "Pipeline", None)


def test_speed_of_each_number_of_processes(tmp_path: Path) -> None:
    """The rows of a step that was repeated belong to the later start."""
    rows = [(1, 40), (2, 42), (3, 20), (4, 22), (5, 41)]
    text = "".join(f"{step},{speed}\n" for step, speed in rows)
    (tmp_path / "metrics.csv").write_text("step,throughput/samples_per_sec\n" + text)
    for step, size in [(0, 4), (3, 4), (3, 2), (5, 4)]:
        append_event(tmp_path, "resume", step, world_size=size)
    assert RunFolder(tmp_path).speeds == {4: 41, 2: 21}


def test_seconds_of_the_ranks(tmp_path: Path) -> None:
    seconds = RunFolder(write_run(tmp_path / "run")).rank_seconds
    assert list(seconds) == [0, 1]
    assert seconds[1]["validation"] == pytest.approx(2.0)


def test_sweep_ranks_its_jobs(tmp_path: Path) -> None:
    job = Job(["seed=0", "lr=1"], "finished", "val/loss", 0.5)
    for number, result in enumerate((0.5, 0.1, None, 0.9, 0.3)):
        (tmp_path / str(number)).mkdir()
        replace(job, overrides=["seed=0", f"lr={number}"], result=result).write(tmp_path / str(number))
    sweep = Sweep(tmp_path)
    assert sweep.overrides[1] == ["lr=1"]
    assert sweep.falls
    assert sweep.ranked == ["3", "0", "4", "1"]
    (tmp_path / "multirun.yaml").write_text("hydra: {sweeper: {direction: maximize}}")
    assert Sweep(tmp_path).ranked == ["1", "4", "0", "3"]


def test_mean_over_seeds_of_which_one_diverged(tmp_path: Path) -> None:
    overrides = [[f"lr={rate}", f"seed={seed}"] for rate in (0, 1) for seed in (0, 1)]
    for number, result in enumerate((0.5, float("nan"), 0.25, 0.75)):
        (tmp_path / str(number)).mkdir()
        Job(overrides[number], "finished", "val/loss", result).write(tmp_path / str(number))
    first, second = Sweep(tmp_path).seed_rows()
    assert list(first.values()) == pytest.approx(["lr=0", 2, float("nan"), float("nan")], nan_ok=True)
    assert list(second.values()) == pytest.approx(["lr=1", 2, 0.5, 0.3535534])
