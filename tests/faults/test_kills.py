"""SIGKILL at random: a few here, fifty in `make test-all`, and as many as wanted by `python -m tests.faults.kills`."""

from pathlib import Path

import pytest

from tests.faults.kills import table, trials
from tests.pool import Pool


@pytest.mark.parametrize(
    ("number", "seed"), [(3, 1), pytest.param(50, 2, marks=pytest.mark.slow)], ids=["a handful", "fifty"]
)
def test_killed_at_random(
    number: int, seed: int, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = list(trials(number, seed, pool, tmp_path))
    assert len(done) == number
    with capsys.disabled():
        print(f"\n{table(done)}")
