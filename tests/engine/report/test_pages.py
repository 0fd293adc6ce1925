"""Every kind of page in a real browser: no error, no request, nothing wider than the screen."""

import os
from pathlib import Path

import pytest

from scripts.report import write
from src.engine.report.write import write_page_of
from src.engine.state.jobs import Job
from tests.support.browser import CHROMIUM, Session, open_pages
from tests.support.run_folders import write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
PHONE, DESKTOP = 400, 1400  # pixels
MIB = 1 << 20
# A page with the mistakes that the tests look for.
BROKEN = """<meta charset="utf-8"><img src="http://outside.example/image.png"><p style="width:3000px">wide</p>
<script>missingFunction()</script>"""


def write_sweep(folder: Path) -> Path:
    """Write a sweep over a number, a name and two seeds, in which one job has failed; return its folder."""
    for number in range(8):
        rate, width, seed = (0.01, 1.0)[number % 2], ("small", "large")[number // 2 % 2], number // 4
        job = Job([f"optimizer.lr={rate}", f"model={width}", f"seed={seed}"], "finished", "val/acc", 0.5 + number / 20)
        job.metrics = {"val/acc": 0.5 + number / 20, "train/loss": 1.0}
        if number == 7:
            job.status, job.result, job.error = "failed", None, "Traceback (most recent call last):\nValueError: <b>"
        job.write(write_run(folder / str(number), points=40))
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a page of each kind, and last the broken one."""
    runs = tmp_path_factory.mktemp("runs")
    first, second = write_run(runs / "first"), write_run(runs / "second", gap=1e-12)
    broken = runs / "broken.html"
    broken.write_text(BROKEN)
    return [
        write([first], None, single_file=False),
        write([write_sweep(runs / "sweep")], None, single_file=False),
        write([first, second], runs / "comparison.html", single_file=True),
        broken,
    ]


@pytest.fixture(scope="module")
def opened(pages: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Session:
    return open_pages(tmp_path_factory.mktemp("chromium"), [(page, PHONE) for page in pages])


def test_every_chart_is_drawn(pages: list[Path], opened: Session) -> None:
    for page, state in zip(pages[:-1], opened.pages, strict=False):
        assert state.charts == page.read_text().count('<figure class="chart') > 0


def test_only_the_broken_page_has_errors(opened: Session) -> None:
    assert opened.console
    assert all("broken.html" in line for line in opened.console), opened.console


def test_only_the_broken_page_asks_for_anything(opened: Session) -> None:
    assert opened.requests == {"http://outside.example/image.png"}


def test_only_the_broken_page_is_wider_than_the_screen(opened: Session) -> None:
    *good, broken = opened.pages
    assert [state.overflow for state in good] == [0] * len(good)
    assert broken.overflow > 0


@pytest.mark.slow
def test_a_page_that_was_moved_says_what_is_missing(pages: list[Path], tmp_path: Path) -> None:
    moved = tmp_path / "alone" / "report.html"
    moved.parent.mkdir()
    moved.write_text(pages[0].read_text())
    session = open_pages(tmp_path, [(moved, PHONE)])
    assert session.pages[0].charts == 0
    assert not any("TypeError" in line or "ReferenceError" in line for line in session.console)


@pytest.mark.slow
def test_dark_pages(pages: list[Path], tmp_path: Path) -> None:
    wide = [(page, DESKTOP) for page in pages[:-1]]
    dark = open_pages(tmp_path, wide, "--blink-settings=preferredColorScheme=0")
    assert not dark.console
    assert not dark.requests
    assert not any(state.overflow for state in dark.pages)


@pytest.mark.slow
def test_a_hundred_thousand_points_open_at_once(tmp_path: Path) -> None:
    page = write_page_of(write_run(tmp_path / "long", points=100_000))
    assert page.stat().st_size < 5 * MIB
    empty = tmp_path / "empty.html"
    empty.write_text("<!doctype html><p>empty</p>")
    seconds = {}
    for file in (empty, page):
        before = os.times()
        (tmp_path / file.stem).mkdir(exist_ok=True)
        open_pages(tmp_path / file.stem, [(file, DESKTOP)])
        after = os.times()  # the processors' time, which other programs do not change
        seconds[file] = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds[page] - seconds[empty] < 3, seconds
