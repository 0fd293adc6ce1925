"""Make the pictures of the docs: train the runs that they show, and draw what these have recorded.

The runs take some minutes on two cores. Drawing needs the extra `pictures`, and Chromium or Chrome.
"""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from engine.dev.pictures import guide
from engine.dev.pictures.figures import bits_figure, curves_figure, schedules_figure
from engine.dev.pictures.runs import CURVES, MICROBATCHES, ONE_BY_ONE, PIPELINES, RANKS, TOGETHER, train
from engine.dev.pictures.svg import to_svg
from engine.dev.shared.process import ROOT
from onecurve.records.files import atomic_write

if TYPE_CHECKING:
    import plotly.graph_objects as go

TITLES = {
    "curves": "Training loss under each strategy, and its relative difference from that of a single process",
    "bits": "Differences of six strategies in float32: with virtual ranks together they grow, one by one they are zero",
    "schedules": "Passes of each pipeline schedule on 4 ranks with 8 micro-batches, simulated and recorded",
} | {picture: title for picture, (_, title) in guide.FIGURES.items()}


def draw(picture: str, runs: Path) -> "go.Figure":
    """Train the runs of a picture in the folder `runs`, as far as they are not there; return its figure."""
    if picture in guide.FIGURES:
        return guide.FIGURES[picture][0]()
    if picture == "schedules":
        return schedules_figure({run.name: train(run, runs) for run in PIPELINES}, RANKS, MICROBATCHES)
    if picture == "bits":
        together, one_by_one = ([train(run, runs) for run in group] for group in (TOGETHER, ONE_BY_ONE))
        return bits_figure(together, one_by_one, [run.name for run in TOGETHER])
    return curves_figure([train(run, runs) for run in CURVES], [run.name for run in CURVES])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TITLES, help="a single picture")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures", help="folder of the pictures")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs; those that it holds are not repeated")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for picture in [arguments.only] if arguments.only else TITLES:
            svg = to_svg(draw(picture, (arguments.runs or Path(scratch)).absolute()), TITLES[picture])
            with atomic_write(arguments.output / f"{picture}.svg") as temporary:
                temporary.write_text(svg)
            print(arguments.output / f"{picture}.svg")


if __name__ == "__main__":
    main()
