"""The pictures of the docs: each is built from recorded runs, and each file stands alone."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from engine.dev.pictures import guide
from engine.dev.pictures.__main__ import TITLES
from engine.dev.pictures.figures import bits_figure, curves_figure, schedules_figure
from engine.dev.pictures.runs import CURVES, ONE_BY_ONE, PIPELINES, TOGETHER, Run
from engine.dev.pictures.svg import palettes, to_svg
from onecurve.extras.report.run_folder import RunFolder
from tests.support.commands import ROOT
from tests.support.run_folders import write_run
from tests.support.runs import compose

PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
KIB = 1 << 10
DRAWN = """<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9" viewBox="0 0 9 9">
<path class="point" d="M1.2345,0" style="fill: rgb(47, 95, 208);"/>
<text style="fill: rgb(254, 254, 254);">0.125</text></svg>"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Two runs of four ranks that have recorded the passes of gpipe with four micro-batches."""
    folder = tmp_path_factory.mktemp("runs")
    return [RunFolder(write_run(folder / name, ranks=4, gap=gap)) for name, gap in (("a", 0.0), ("b", 1e-12))]


def traces(figure: Any, axis: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name != "bubble" and (trace.yaxis or "y") == axis]


def test_curves_and_their_differences(runs: list[RunFolder]) -> None:
    figure = curves_figure(runs, ["single process", "ddp × 2"])
    assert [trace.name for trace in traces(figure, "y")] == ["single process", "ddp × 2"]
    (gaps,) = traces(figure, "y2")
    assert 0 < max(gaps.y) < 1e-11


def test_differences_in_both_ways(runs: list[RunFolder]) -> None:
    figure = bits_figure(runs, [runs[0]] * 2, ["single process", "ddp × 2"])
    (grown,), (none,) = traces(figure, "y"), traces(figure, "y2")
    assert 0 < max(grown.y) < 1e-11
    assert all(gap != gap for gap in none.y)  # not a number: nothing is drawn
    assert re.fullmatch(r"(\d+) of \1 differences are zero", figure.layout.annotations[1].text)


def test_schedules_as_simulated_and_as_recorded(tmp_path: Path) -> None:
    run = RunFolder(write_run(tmp_path / "run", ranks=4))
    figure = schedules_figure({"gpipe": run}, ranks=4, microbatches=4)
    for axis in ("y", "y2"):
        assert {trace.name: len(trace.x) for trace in traces(figure, axis)} == {"forward": 16, "backward": 16}
    assert [note.text.partition(": ")[2] for note in figure.layout.annotations] == [
        "the ranks idle 42.9% of the step",
        "the ranks idle 42.9%",
    ]
    assert [trace.name for trace in figure.data if trace.showlegend] == ["bubble", "forward", "backward"]


@pytest.mark.slow
def test_the_simulated_losses_follow_the_formula() -> None:
    """Around the minimum; at long intervals the formula of the first order is too small."""
    formula, simulated, best, *_ = guide.interval_figure().data
    assert best.y[0] == pytest.approx(min(formula.y), rel=1e-3)
    for minutes, lost in zip(simulated.x, simulated.y, strict=True):
        if minutes < 2 * best.x[0]:
            assert lost == pytest.approx(formula.y[formula.x.index(minutes)], rel=0.1)


def test_the_ring_takes_its_latency_and_its_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [2 * (0.05 + 8e-6 * length) for length in guide._LENGTHS]  # two messages of 50 µs, and 0.5 GB/s
    monkeypatch.setattr(guide, "run_ranks", lambda *_: [times])
    fit, measured, *_ = guide.ring_figure().data
    assert "α = 50 µs, β = 0.5 GB/s" in fit.name
    assert list(measured.y) == pytest.approx(times)


@pytest.mark.parametrize("run", [CURVES[-1], TOGETHER[-1], ONE_BY_ONE[-1], PIPELINES[-1]], ids=lambda run: run.folder)
def test_pictured_runs_have_valid_options(run: Run, tmp_path: Path) -> None:
    cfg = compose(tmp_path, *run.options)
    assert cfg.trainer.max_steps > 0


def test_an_svg_follows_the_theme(runs: list[RunFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kaleido, which is not installed here, gets a figure without CSS variables; its result gets them back."""
    go = pytest.importorskip("plotly.graph_objects")
    exported = []

    def to_image(figure: Any, **_: Any) -> bytes:
        exported.append(figure.to_json())
        return DRAWN.encode()

    monkeypatch.setattr(go.Figure, "to_image", to_image)
    svg = to_svg(curves_figure(runs, ["a", "b"]), "a < b")
    assert "var(--" not in exported[0]
    root = ElementTree.fromstring(svg)
    assert root[0].text == "a < b"
    light, dark = palettes()
    style = "".join(root.itertext())
    for name in ("accent", "on-pass", "card"):
        assert f"--{name}:{light[name]}" in style.partition("@media")[0]
        assert f"--{name}:{dark[name]}" in style.partition("@media")[2]
    assert 'd="M1.2,0"' in svg
    assert ">0.125<" in svg
    assert "rgb(" not in svg


def test_docs_show_every_picture() -> None:
    shown = {
        (page.parent / path).resolve()
        for page in PAGES
        for path in re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text())
    }
    assert shown == set(PICTURES)
    assert {file.stem for file in PICTURES} == set(TITLES)


@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.name)
def test_a_picture_stands_alone(file: Path) -> None:
    text = file.read_text()
    assert len(text) < 300 * KIB
    root = ElementTree.fromstring(text)
    assert root[0].tag.endswith("title")
    assert root[0].text
    assert not [element.tag for element in root.iter() if element.tag.endswith(("script", "image", "foreignObject"))]
    references = [value for element in root.iter() for name, value in element.items() if name.endswith("href")]
    references += re.findall(r"url\(([^)]*)\)", text) + re.findall(r"@import.*", text)
    assert all(reference.strip("'\"").startswith("#") for reference in references), references
    for scheme in text.split("@media")[:2]:
        assert set(re.findall(r"var\(--([\w-]+)\)", text)) <= set(re.findall(r"--([\w-]+):#", scheme))
