"""Online where a key is configured, otherwise offline; and no prompt."""

import subprocess
import sys
from pathlib import Path

import pytest

# It ends at once: wandb's own way out waits for its service, once seen to do so for ever.
SCRIPT = (
    "import os; from src.loggers.wandb import online_or_offline; print(online_or_offline(), flush=True); os._exit(0)"
)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "0123456789" * 4}, "online"),
        ({"WANDB_API_KEY": "0123456789" * 4, "WANDB_MODE": "disabled"}, "disabled"),
    ],
)
def test_mode(variables: dict[str, str], expected: str, tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(
        command, env=environment | variables, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert result.stdout.split()[-1:] == [expected], result.stderr
