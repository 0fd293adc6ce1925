"""Pruning follows a metric of validation."""

from types import SimpleNamespace
from typing import Any

import pytest

from onecurve.errors import UserError
from onecurve.extras.sweeps.pruning import Pruning


def test_a_metric_that_validation_does_not_log() -> None:
    trainer: Any = SimpleNamespace(sanity_checking=False, callback_metrics={"val/loss": 1.0, "val/acc": 0.5})
    pruning = Pruning("test/acc", pruner=None, trial={"storage": "", "study": "", "number": 0})
    with pytest.raises(UserError, match=r"monitor=test/acc is not logged in validation: take one of val/acc, val/loss"):
        pruning.on_validation_end(trainer, None)  # type: ignore[arg-type]
