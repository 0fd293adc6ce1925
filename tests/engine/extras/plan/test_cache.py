"""What is measured of this machine, and the file in runs/ that keeps it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from onecurve.extras.plan import hardware
from tests.support.pool import Pool


@pytest.mark.parametrize("text", ["", '{"a": 1', "[1]", None], ids=["empty", "cut", "list", "missing"])
def test_an_unreadable_file_ends_no_run(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "PROJECT", tmp_path)
    file = tmp_path / "runs" / hardware._FILE
    if text is not None:
        file.parent.mkdir()
        file.write_text(text)
    assert hardware._read_cache() == {}
    hardware._update_cache({"b": 2})
    assert hardware._read_cache() == {"b": 2}


_LINK = {"gb_per_s": 1.0, "us": 2.0}
_FIGURES = {"within": _LINK, "between": _LINK, "memory_gb_per_s": 3.0, "sharding_us": 0.0}


@pytest.mark.parametrize(
    "figures",
    [
        None,
        [],
        {},
        _FIGURES | {"typo": 1.0},
    ],
    ids=["missing", "list", "empty", "another"],
)
def test_damaged_figures_are_measured_again(figures: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "PROJECT", tmp_path)
    monkeypatch.setattr(hardware, "_measure", lambda gpus: _FIGURES)
    hardware.this_machine()
    name, measured = next(iter(hardware._read_cache().items()))
    assert measured == _FIGURES
    hardware._update_cache({name: figures})
    assert hardware.this_machine().memory_gb_per_s == 3.0


def test_figures_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "PROJECT", tmp_path)
    measure = Mock(return_value=_FIGURES)
    monkeypatch.setattr(hardware, "_measure", measure)
    assert hardware.this_machine() == hardware.this_machine()
    measure.assert_called_once()


LITTLE: dict[str, Any] = {"_WIDTHS": (8, 64), "_REPEATS": 2, "_LAYERS": 2}


def call_as_rank(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with patch.multiple(hardware, **LITTLE):
        function(int(os.environ["RANK"]), *arguments)


def test_measures_two_processes(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On waiting ranks in the place of new processes, with small weights."""

    def start(function: Callable[..., None], arguments: tuple[Any, ...], nprocs: int, start_method: str) -> None:
        pool.run(nprocs, call_as_rank, function, arguments)

    monkeypatch.setattr(hardware, "start_processes", start)
    with patch.multiple(hardware, **LITTLE):
        figures = hardware._measure(0)
    assert figures.keys() == hardware._FIGURES
    assert min(figures["within"]["gb_per_s"], figures["memory_gb_per_s"]) > 0
