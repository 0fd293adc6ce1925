"""Random configurations, stopped and moved at random moments, equal the uninterrupted run.

`python -m tests.engine.fuzz --draws 500 --seed 7` draws others.
"""

from pathlib import Path

import pytest
from hypothesis import given, note, settings

from tests.engine.fuzz.cases import SETTINGS, Case, cases
from tests.engine.fuzz.check import Checker
from tests.support.pool import Pool


@pytest.mark.parametrize("draws", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_interrupted_run_equals_the_uninterrupted_one(draws: int, pool: Pool, small: list[str], tmp_path: Path) -> None:
    checker = Checker(pool, small, tmp_path)

    @settings(SETTINGS, max_examples=draws, derandomize=True)
    @given(cases())
    def check(case: Case) -> None:
        note(case.command)
        checker.check(case)

    check()
