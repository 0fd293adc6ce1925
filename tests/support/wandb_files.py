"""Reader of the files that wandb writes offline."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all offline runs below a folder, read by wandb's own program."""
    records = []
    for file in sorted(folder.glob("**/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        records += [json.loads(line) for line in lines]
    return records


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the settings of all offline runs below a folder."""
    runs: dict[str, dict[str, Any]] = {}
    for record in read_records(folder):
        if "run" in record:
            runs.setdefault(record["run"]["run_id"], record["run"])
    return list(runs.values())
