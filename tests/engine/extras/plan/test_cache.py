"""The file in runs/ that keeps what was measured of this machine."""

from pathlib import Path

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
