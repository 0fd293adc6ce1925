"""The benchmark's programs do the same work as this template, and its numbers are correct."""

import csv
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.dev import parity
from engine.dev.benchmarks.cases import BENCHMARKS
from engine.dev.benchmarks.programs import Case, Program, run_in_turn, table
from engine.dev.peers.callbacks import Communication, resident
from tests.support.pool import Pool
from tests.support.runs import NEED_GPUS, STRATEGIES, compose, fit

STEPS, BATCH = 6, 32
SAME = [
    "model=resnet9",
    "trainer.devices=2",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=-1",
    "trainer.log_every_n_steps=2",
    "trainer.limit_val_batches=0",
    f"data.batch_size={BATCH}",
    f"module.reference_batch_size={BATCH}",
    "data.val_fraction=0",
    "callbacks.best=null",
    "callbacks.checkpoint=null",
]


def run_peer(script: str, clock: Path, *options: object) -> None:
    """Run one rank of a hand-written program, and restore the process's number of threads."""
    threads, arguments = torch.get_num_threads(), sys.argv
    sys.argv = [script, "--clock", str(clock), "--steps", str(STEPS), "--log-every", "2", "--batch", str(BATCH)]
    sys.argv += map(str, options)
    try:
        importlib.import_module(f"engine.dev.peers.{script}").main()
    finally:
        sys.argv = arguments
        torch.set_num_threads(threads)


def losses(file: Path) -> list[float]:
    return [float(loss) for _, loss in csv.reader(file.read_text().splitlines())]


def test_hand_written_ddp_has_the_same_losses(pool: Pool, cifar: Path, folder: Path) -> None:
    clock, in_order = folder.parent / "clock.json", "virtual_ranks=1"  # groups order the samples of a batch
    pool.run(2, run_peer, "handwritten", clock, "--data", cifar)
    ours = pool.run(2, fit, compose(folder, f"data.root={cifar}", *SAME, "trainer.sync_batchnorm=false", in_order))
    expected = losses(clock.with_suffix(".csv"))
    assert len(expected) == STEPS // 2
    assert ours[0].losses == pytest.approx(expected, rel=1e-4)
    assert [step for step, _ in json.loads(clock.read_text())] == [1, 2, 4, 6]


@pytest.mark.slow
def test_hand_written_pipeline_has_the_same_losses(pool: Pool, cifar: Path, folder: Path) -> None:
    clock = folder.parent / "clock.json"
    pool.run(2, run_peer, "handwritten_pipeline", clock, "--data", cifar, "--microbatches", 4)
    options = ["strategy=pipeline", "module.channels_last=false"]
    ours = pool.run(2, fit, compose(folder, f"data.root={cifar}", *SAME, *options))
    expected = losses(clock.with_suffix(".1.csv"))
    assert len(expected) == STEPS // 2
    assert ours[0].losses == pytest.approx(expected, rel=1e-4)


def fit_profiled(cfg: Any, file: str) -> None:
    fit(cfg, Communication(file, first=3, last=STEPS))


def test_reads_memory_and_communication(pool: Pool, cifar: Path, folder: Path) -> None:
    pool.run(2, fit_profiled, compose(folder, f"data.root={cifar}", *SAME), str(folder.parent / "rank"))
    for rank in range(2):
        found = json.loads((folder.parent / f"rank.{rank}.json").read_text())
        assert 0 < found["communicating"] <= 100
        assert found["MB"] > 0


def test_parity_table_has_its_tests() -> None:
    assert parity.TEST.is_file()


def test_resident_set_counts_touched_memory() -> None:
    before = resident("VmRSS")
    held = torch.ones(2**26, dtype=torch.uint8)
    assert resident("VmRSS") - before == pytest.approx(held.nbytes, rel=0.05)


def test_every_strategy_is_measured(cifar: Path) -> None:
    names = {program.name for case in BENCHMARKS["strategies"](cifar) for program in case.programs}
    assert "auto x1" in names
    others = {name for name in STRATEGIES if name != "auto"}
    assert {name.split()[0] for name in names} - set(NEED_GPUS) == others | {"auto"}
    assert all(f"{name} x{processes}" in names for name in others for processes in (2, 4))


def test_compares_within_rounds() -> None:
    case = Case("a step", "step ms", [Program("fast", []), Program("slow", [])])
    found = {"fast": [{"step ms": 1.0}, {"step ms": 2.0}], "slow": [{"step ms": 2.0}, {"step ms": 2.0}]}
    columns = {column.header: list(column.cells) for column in table(case, found).columns}
    assert columns["ratio of step ms"] == ["1 (1 to 1)", "1.5 (1 to 2)"]


def test_programs_run_in_turn_and_report_failures(tmp_path: Path) -> None:
    order = tmp_path / "order"
    programs = [
        Program(name, [sys.executable, "-c", f"open({str(order)!r}, 'a').write({name!r})"]) for name in ("a", "b")
    ]
    found = run_in_turn(Case("", "seconds", programs), 2, tmp_path / "scratch")
    assert order.read_text() == "abba"
    assert all(value["seconds"] > 0 for values in found.values() for value in values)
    failing = Program("c", [sys.executable, "-c", "raise ValueError('this is why')"])
    with pytest.raises(SystemExit, match="this is why"):
        run_in_turn(Case("", "seconds", [failing]), 1, tmp_path / "scratch")
