"""Run folders with every file that a run can record, written without a run."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
PLAN: dict[str, Any] = {  # what plan.json has: of two candidates, and of two that are refused
    "title": "8 ranks",
    "usable GiB": 2.0,
    "columns": ["strategy", "GiB", "step_ms", "why not"],
    "candidates": [
        {
            "strategy": name,
            "options": [f"strategy={name}"],
            "GiB": gib,
            "step_ms": step,
            "why not": why,
            "memory": {"weights": gib * 2**29, "activations": gib * 2**29},
            "seconds": {"forward": step / 2000, "communication": step / 2000},
            "collectives": [],
        }
        for name, gib, step, why in (("fsdp", 1.0, 20.0, ""), ("ddp", 3.0, 25.0, "needs 3.0 GiB of 2.0"))
    ],
    "refused": {"<b> too many": ["pipeline microbatches=8", "pipeline microbatches=16"]},
}
_START = 1_770_000_000.0  # UNIX seconds


def write_run(
    folder: Path,
    points: int = 60,
    ranks: int = 2,
    gap: float = 0.0,
    cells: dict[str, float] | None = None,
    precision: str = "64-true",
) -> Path:
    """Write a run with all files; return its folder.

    Args:
        folder: its folder, which must not exist.
        points: number of log points, ten steps apart.
        ranks: number of ranks.
        gap: relative difference of its losses from those of another run.
        cells: values that replace those of the middle row of metrics.csv.
        precision: the option `trainer.precision`.
    """
    folder.mkdir(parents=True)
    _write_metrics(folder / "metrics.csv", points, gap, cells or {})
    strategy: dict[str, Any] = {"_target_": "onecurve.parallel.pipeline.pipeline.Pipeline", "schedule": "gpipe"}
    strategy |= {"stages": None, "microbatches": 4}
    config = {"seed": 0, "strategy": strategy, "optimizer": {"lr": 0.1}, "experiment": "5f3a9c"}
    config |= {"trainer": {"precision": precision}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    _write_lines(folder / "events.jsonl", _events(points))
    for rank in range(ranks):
        _write_lines(folder / "timeline" / f"rank{rank}.jsonl", _timeline(rank, ranks, min(points, 60)))
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "test.json").write_text(json.dumps(_evaluation()))
    return folder


def _write_metrics(file: Path, points: int, gap: float, cells: dict[str, float]) -> None:
    rng, rows = np.random.default_rng(0), []
    for point in range(points):
        done = point / points
        loss = (2.3 * np.exp(-4 * done) + 0.05 * rng.random()) * (1 + gap * rng.random())
        row = {"step": 10 * point, "epoch": 4 * point // points, "train/loss": loss, "train/acc": 0.9 * done + 0.1}
        row |= {"lr": 0.1 * min(1, 5 * done) * (1 - done), "optim/grad_norm": 10 ** (1 - 3 * done) + rng.random() / 10}
        row |= {"throughput/samples_per_sec": 900 + 50 * rng.random(), "throughput/peak_memory_mib": 512.0}
        row |= {"throughput/step_ms": 150.0, "throughput/planned_step_ms": 120.0}
        row |= {"ranks/busy_ms_max": 60 + 9 * rng.random(), "ranks/busy_ms_median": 55 + rng.random()}
        row |= {"ranks/slowest": 1, "ranks/gain": 0.1, "val/loss": "", "val/acc": "", "test/acc": ""}
        if point % 15 == 14:
            row |= {"val/loss": loss + 0.1, "val/acc": 0.85 * done}
        rows.append(row)
    rows[points // 2] |= cells
    rows.append(dict.fromkeys(rows[0], "") | {"step": 10 * points, "test/acc": 0.83})
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _events(points: int) -> list[dict[str, Any]]:
    start = {
        "command": ["train.py", "experiment=quickstart", "strategy=pipeline"],
        "strategy": "pipeline",
        "world_size": 2,
    }
    start |= {"revision": "0123456789abcdef", "modified": True, "device": "cpu", "hosts": 1}
    changes = {"optimizer.lr": "0.1", "data.batch_size": "128", "strategy": "pipeline"}
    killed = int(0.45 * points) * 10
    return [
        {"time": _START, "event": "start", "step": None, "reason": None, "changes": changes} | start,
        {"time": _START + 60, "event": "killed", "step": killed, "reason": "no end was recorded"},
        {"time": _START + 4001, "event": "resume", "step": killed, "reason": None, "changes": changes} | start,
        {"time": _START + 4090, "event": "finished", "step": 10 * points, "reason": None},
    ]


def _timeline(rank: int, ranks: int, points: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"kind": "process", "rank": rank, "host": "node1", "pid": 7, "start": _START}]
    for point in range(points):
        slow = 0.05 * rank
        spans = {"data": 0.06, "forward_backward": 0.6 + slow, "communication": 0.25 - slow, "optimizer": 0.05}
        if point % 15 == 14:
            spans |= {"validation": 0.5, "save": 0.2}
        seconds = sum(spans.values()) + 0.04
        interval = {"kind": "interval", "step": 10 * point, "steps": 10, "start": _START + point, "seconds": seconds}
        lines.append(interval | {"spans": spans, "peak_memory_mib": 500.0 + rank})
    lines.append({"kind": "passes", "step": 10, "start": _START + 10.0, "passes": _passes(rank, ranks)})
    return lines


def _passes(rank: int, ranks: int, microbatches: int = 4) -> list[list[Any]]:
    """Return the passes of GPipe: every forward pass takes 10 ms, every backward pass 20 ms."""
    turn = ranks - 1 - rank
    forward = [[rank, k, "F", 0.01 * (rank + k), 0.01 * (rank + k + 1)] for k in range(microbatches)]
    begin = 0.01 * (ranks - 1 + microbatches)
    backward = [[rank, k, "B", begin + 0.02 * (turn + k), begin + 0.02 * (turn + k + 1)] for k in range(microbatches)]
    return [*forward, *backward]


def _evaluation() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    confusion = rng.integers(0, 12, (10, 10)) + np.diag(rng.integers(60, 100, 10))
    return {"step": 600, "classes": CLASSES, "confusion": confusion.tolist()}


def _write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
