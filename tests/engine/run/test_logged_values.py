"""Values that a module logs, where the ranks that share the samples change."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onecurve.run import logged_values
from onecurve.run.logged_values import LoggedValues


def test_each_stage_of_a_pipeline_logs_with_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second test has another process group of the same ranks, by which Lightning would refuse the values."""
    trainer: Any = SimpleNamespace(virtual_metrics=None, precision="32-true")
    monkeypatch.setattr(logged_values, "group_of_samples", lambda trainer: trainer.group)
    results = LoggedValues(trainer, training=False)
    options: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True, "sync_dist_group": None}
    for group in (object(), object()):
        trainer.group = group
        for name in ("a", "b"):
            results.log("test_step", name, torch.tensor(1.0), **options, batch_size=1)
        assert [result.meta.sync.group for result in results.values()] == [group, group]
