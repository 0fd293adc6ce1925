"""Every kind of page in a real browser: no error, no request, nothing wider than the screen."""

from pathlib import Path

import pytest

from onecurve.extras.jobs import Job
from onecurve.extras.report.plan_page import write_plan_page
from scripts.report import write
from tests.support.browser import CHROMIUM, Session, open_pages
from tests.support.run_folders import PLAN, write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
PHONE = 400  # pixels
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
        write_plan_page(first, PLAN),
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
    of_pages = {url for url in opened.requests if "google.com/" not in url}  # Chromium asks its maker at its start
    assert of_pages == {"http://outside.example/image.png"}


def test_only_the_broken_page_is_wider_than_the_screen(opened: Session) -> None:
    *good, broken = opened.pages
    assert [state.overflow for state in good] == [0] * len(good)
    assert broken.overflow > 0
