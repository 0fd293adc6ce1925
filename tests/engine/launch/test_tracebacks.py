"""Frames of libraries and of src/engine are folded, if a frame of the user's remains."""

import json

from src.engine.config.folder import PROJECT
from src.engine.launch.tracebacks import fold_frames

LIGHTNING = '  File "/x/.venv/lib/python3.11/site-packages/lightning/call.py", line 3, in call\n    f(\n    ^^\n'
ENGINE = f'  File "{PROJECT}/src/engine/run/module.py", line 4, in log_step\n    self.log()\n'
JSON = f'  File "{json.__file__}", line 5, in loads\n  [Previous line repeated 2 more times]\n'
MODEL = f'  File "{PROJECT}/src/models/mlp.py", line 6, in forward\n    self.net(x)\n'
HEADER, MESSAGE = "Traceback (most recent call last):\n", "ValueError: a\n  b\n"


def test_folds_what_is_not_the_users() -> None:
    trace = HEADER + LIGHTNING + ENGINE + MODEL + JSON + MESSAGE
    folded = "  ... 2 frames of lightning, src/engine ...\n" + MODEL + "  ... 1 frame of Python ...\n"
    assert fold_frames(trace) == HEADER + folded + MESSAGE


def test_folds_each_cause() -> None:
    cause = "\nThe above exception was the direct cause of the following exception:\n\n"
    trace = HEADER + LIGHTNING + MODEL + MESSAGE + cause + HEADER + LIGHTNING + MESSAGE
    assert fold_frames(trace) == trace.replace(LIGHTNING, "  ... 1 frame of lightning ...\n")


def test_a_bug_of_the_template_keeps_its_traceback() -> None:
    trace = HEADER + LIGHTNING + ENGINE + MESSAGE
    assert fold_frames(trace) == trace
    assert fold_frames("rank 0 died") == "rank 0 died"
