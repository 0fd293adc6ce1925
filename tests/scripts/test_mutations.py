"""The list of files whose mutants are examined; `make mutations` examines them."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = yaml.safe_load((ROOT / "engine" / "dev" / "mutations" / "files.yaml").read_text())


@pytest.mark.parametrize("name", FILES)
def test_files_and_their_tests_exist(name: str) -> None:
    assert (ROOT / name).is_file()
    assert [test for test in FILES[name]["tests"] if not (ROOT / test).is_file()] == []
    groups = FILES[name].get("equivalent", [])
    assert all(group["why"].endswith(".") and group["mutants"] for group in groups)
    mutants = [mutant for group in groups for mutant in group["mutants"]]
    assert len(mutants) == len({*mutants}), "a mutant has one reason"
