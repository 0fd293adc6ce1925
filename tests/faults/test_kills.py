"""SIGKILL at random, fifty times; any number by `python -m tests.faults.kills`."""

from pathlib import Path

import pytest

from tests.faults.kills import table, trials
from tests.support.pool import Pool


@pytest.mark.slow
def test_resumes_after_random_kills(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = list(trials(50, 2, pool, tmp_path))
    assert len(done) == 50
    with capsys.disabled():
        print(f"\n{table(done)}")
