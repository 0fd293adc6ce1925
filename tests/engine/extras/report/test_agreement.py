"""Whether runs of one experiment have one curve, on the page and in the terminal."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from onecurve.extras.report.agreement import verdicts
from onecurve.extras.report.run_folder import Curve, RunFolder
from scripts.compare import main as compare
from scripts.report import write
from tests.support.run_folders import write_run

STEPS = np.array([0.0, 1.0, 2.0, 50.0])


def run(folder: Path, precision: str, device: str, *gaps: float) -> RunFolder:
    """Return a run whose losses differ from 2 by these relative gaps."""
    found = RunFolder(folder)
    vars(found).update(
        config={"experiment": "5f3a9c", "trainer.precision": precision},
        curves={"train/loss": Curve(STEPS, 2 * (1 + np.array(gaps)))},
        events=[{"event": "start", "device": device}],
    )
    return found


@pytest.mark.parametrize(
    ("precision", "device", "gaps", "step"),
    [
        ("64-true", "cpu", (0, 1e-13, 1e-13, 5e-10), None),
        ("64-true", "cpu", (0, 1e-13, 1e-13, 1e-8), 50),
        ("32-true", "cpu", (1e-7, 2e-6, 1e-4, 0.1), None),  # about what docs/how-it-works.md has
        ("32-true", "cpu", (2e-5, 0, 0, 0), 0),
        ("32-true", "cpu", (1e-7, 2e-6, 0.02, 0.1), 2),
        ("32-true", "cpu", (0, 0, 0, 0.6), 50),
        ("32-true", "NVIDIA H100", (1e-4, 1e-4, 1e-2, 0.1), None),
        ("bf16-mixed", "cpu", (1e-3, 1e-2, 1e-2, 0.1), None),
        ("bf16-mixed", "cpu", (0.1, 0, 0, 0), 0),
    ],
)
def test_runs_part_beyond_rounding(precision: str, device: str, gaps: tuple[float, ...], step: int | None) -> None:
    pair = [run(Path("a"), precision, device, 0, 0, 0, 0), run(Path("b"), precision, device, *gaps)]
    (verdict,) = verdicts(pair, ["a", "b"])
    assert verdict.parts is (step is not None)
    assert verdict.sentence.startswith("Experiment 5f3a9c: b ")
    assert step is None or f"b parts from a at step {step}: train/loss differs by" in verdict.sentence


@pytest.mark.parametrize(("gap", "parts"), [(8e-8, False), (1e-4, True)])
def test_losses_that_torchmetrics_round_to_float32(gap: float, parts: bool) -> None:
    pair = [run(Path("a"), "64-true", "cpu", 0, 0, 0, 0), run(Path("b"), "64-true", "cpu", 0, 0, gap, gap)]
    loss = pair[1].curves["train/loss"]
    pair[1].curves["train/loss"] = loss._replace(values=loss.values.astype(np.float32).astype(float))
    assert verdicts(pair, ["a", "b"])[0].parts is parts


def test_losses_that_are_not_finite() -> None:
    pair = [run(Path(name), "64-true", "cpu", 0, 0, np.nan, np.nan) for name in "ab"]
    assert "one curve" in verdicts(pair, ["a", "b"])[0].sentence
    pair[1].curves["train/loss"].values[2] = 3.0
    verdict = verdicts(pair, ["a", "b"])[0]
    assert verdict.parts
    assert verdict.sentence.endswith("b parts from a at step 2: train/loss is 3 and nan.")


def test_a_loss_without_a_common_step() -> None:
    pair = [run(Path(name), "64-true", "cpu", 0, 0, 0, 0) for name in "ab"]
    pair[1].curves["train/loss"] = Curve(STEPS + 1000, np.full(4, 2.0))
    assert "have logged train/loss at no common step" in verdicts(pair, ["a", "b"])[0].sentence


def test_a_shorter_run_is_named() -> None:
    pair = [run(Path(name), "64-true", "cpu", 0, 0, 0, 0) for name in "ab"]
    pair[1].curves["train/loss"] = Curve(STEPS[:3], np.full(3, 2.0))
    (verdict,) = verdicts(pair, ["a", "b"])
    assert not verdict.parts
    assert verdict.sentence.endswith("are equal. b has logged up to step 2, a to 50.")


def test_in_float64_every_loss_is_held_to_the_curve() -> None:
    """As of a module that logs its validation without `sync_dist`: the value of rank zero's samples."""
    pair = [run(Path(name), "64-true", "cpu", 0, 0, 0, 0) for name in "ab"]
    for one, value in zip(pair, (0.5251, 0.5210), strict=True):
        one.curves["val_loss"] = Curve(np.array([3.0]), np.array([value]))
    (verdict,) = verdicts(pair, ["a", "b"])
    assert verdict.parts
    assert "b parts from a at step 3: val_loss differs by 7.8e-03" in verdict.sentence


def test_without_a_loss_another_metric_is_compared(tmp_path: Path) -> None:
    pair = [run(tmp_path, "32-true", "cpu", 0, 0, 0, 0) for _ in range(2)]
    for one in pair:
        vars(one).update(curves={"pinball": one.curves["train/loss"]})
    (verdict,) = verdicts(pair, ["a", "b"])
    assert "have one curve: 4 log points of pinball are equal" in verdict.sentence


def test_compares_any_loss_that_both_runs_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one curve, logged at each second step and at each step."""
    pair = []
    for name, every in (("a", 2), ("b", 1)):
        (tmp_path / name).mkdir()
        rows = [f"{step},{3 - step / 10},0.1" for step in range(0, 8, every)]
        (tmp_path / name / "metrics.csv").write_text("\n".join(["step,train_loss,lr", *rows, ""]))
        (tmp_path / name / "config.yaml").write_text("{experiment: 5f3a9c, trainer: {precision: 64-true}}")
        pair.append(RunFolder(tmp_path / name))
    (verdict,) = verdicts(pair, ["a", "b"])
    assert (
        "have one curve: 4 log points of train_loss are equal. b has logged up to step 7, a to 6." in verdict.sentence
    )
    monkeypatch.setattr("sys.argv", ["compare", *(str(run.path) for run in pair)])
    with pytest.raises(SystemExit) as end:
        compare()
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "train_loss" in out
    assert [line.split("│")[2].strip() for line in out.splitlines() if "largest gap" in line] == ["0.0000"]


def test_names_a_cause_where_the_numbers_of_ranks_differ() -> None:
    pair = [run(Path("a"), "64-true", "cpu", 0, 0, 0, 0), run(Path("b"), "64-true", "cpu", 1, 1, 1, 1)]
    cause = "A module of your own logs train/loss with sync_dist=True"
    assert cause not in verdicts(pair, ["a", "b"])[0].sentence
    pair[1].events[0]["world_size"] = 2
    assert cause in verdicts(pair, ["a", "b"])[0].sentence


@pytest.mark.parametrize(
    ("loss", "threads", "sentence"),
    [
        (2.0, 1, "b and a are equal to the last bit (4 values)."),
        (2.0000000000000004, 1, "train/loss is 2.0000000000000004 and 2.0, which differ from digit 17 on."),
        (2.5, 1, "which differ from digit 2 on."),
        (float("inf"), 1, "train/loss is inf and 2.0, which differ from digit 1 on."),
        (2.5, 2, "which differ from digit 2 on. They differ in threads (2, 1), which changes bits."),
    ],
)
def test_bits_of_runs_with_virtual_ranks(loss: float, threads: int, sentence: str) -> None:
    pair = [run(Path(name), "32-true", "cpu", 0.0, 0.0, 0.0, 0.0) for name in ("a", "b")]
    for one, number in zip(pair, (1, threads), strict=True):
        one.config["bit_exact"] = True
        one.events[0]["numerics"] = {"threads": number}
    pair[1].curves["train/loss"].values[-1] = loss
    (verdict,) = verdicts(pair, ["a", "b"])
    assert sentence in verdict.sentence
    assert verdict.parts is ("equal" not in sentence and threads == 1)
    assert "equal" in sentence or "b parts from a at step 50" in verdict.sentence


def test_runs_without_a_common_value_are_not_equal() -> None:
    pair = [run(Path(name), "32-true", "cpu", 0.0, 0.0, 0.0, 0.0) for name in ("a", "b")]
    pair[0].config["bit_exact"] = pair[1].config["bit_exact"] = True
    pair[1].curves.clear()
    assert "have logged nothing at the same step" in verdicts(pair, ["a", "b"])[0].sentence


def test_page_and_command_say_where_runs_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, same, other = (write_run(tmp_path / name) for name in ("first", "same", "other"))
    config = yaml.safe_load((other / "config.yaml").read_text())
    changed = config["strategy"] | {"microbatches": 8}  # hardware
    (other / "config.yaml").write_text(
        json.dumps(config | {"experiment": "000000", "optimizer": {"lr": 0.2}, "strategy": changed})
    )
    (first / "config.yaml").write_text(json.dumps(config | {"optimized_metric": "val/loss"}))
    apart = write_run(tmp_path / "apart", gap=1e-6)
    page = write([first, same, other, apart], None, single_file=False).read_text()
    assert "same and first have one curve" in page
    assert "apart parts from first at step 0: train/loss differs by" in page
    assert "other" not in page.partition("Experiment ")[2].partition("<section")[0], "it is another experiment"
    assert "000000" in page
    file = tmp_path / "plotly.min.js"
    file.touch()
    for arguments, code in (((first, same, other), 0), ((first, apart, file), 1)):
        monkeypatch.setattr("sys.argv", ["compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            compare()
        assert end.value.code == code
    out = capsys.readouterr().out
    assert f"1: {first}\n2: {same}\n3: {other}\n" in out
    assert out.count("val/loss") == 2, "the metric of the first run's sweeps"
    gaps = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "gap" in line]
    names = ["mean gap", "largest gap"]
    assert [row[0] for row in gaps] == 2 * [*names, *(f"{name}, train/loss" for name in names)]
    assert "3 differs from 1 in optimizer.lr=0.2 (0.1).\n" in out
    assert max(len(line) for line in out.splitlines() if line.startswith(("┃", "│"))) <= 80
    assert "Runs of different experiments are not held to one curve." in out
    assert "have one curve: 60 log points of train/loss are equal." in out
    assert "000000" in out
    assert f"{apart} parts from {first} at step 0: train/loss differs by" in out


def test_the_options_of_an_experiment_whose_class_is_in_a_script(tmp_path: Path) -> None:
    config = {"module": {"_target_": "__main__.Demo", "lr": 0.1}, "trainer": {"devices": 2}, "experiment": "5f3a9c"}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert RunFolder(tmp_path).experiment_options == {"module._target_": "__main__.Demo", "module.lr": 0.1}
