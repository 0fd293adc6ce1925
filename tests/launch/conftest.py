"""The tests of this folder start processes too, and leave none."""

from tests.faults.conftest import nothing_is_left as nothing_is_left
