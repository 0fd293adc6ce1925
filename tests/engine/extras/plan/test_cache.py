"""The file in runs/ that keeps what was measured of this machine."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from onecurve.extras.plan import hardware


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
