"""The files in runs/ in which plans are kept."""

from pathlib import Path

import pytest

from onecurve import plan


@pytest.mark.parametrize("text", ["", '{"a": 1', "[1]", None], ids=["empty", "cut", "list", "missing"])
def test_an_unreadable_file_ends_no_run(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PROJECT", tmp_path)
    file = tmp_path / "runs" / plan.PLANS
    if text is not None:
        file.parent.mkdir()
        file.write_text(text)
    assert plan.read_cache(plan.PLANS) == {}
    plan.update_cache(plan.PLANS, {"b": 2})
    assert plan.read_cache(plan.PLANS) == {"b": 2}
