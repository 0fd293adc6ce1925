"""The tests of this folder start processes as well, and must leave none."""

from tests.engine.faults.conftest import nothing_is_left as nothing_is_left
