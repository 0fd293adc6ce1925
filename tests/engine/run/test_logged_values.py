"""Values that a module logs, where the ranks that share the samples change, or have different values."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

import onecurve
from onecurve.errors import UserError
from onecurve.run import logged_values
from onecurve.run.logged_values import LoggedValues
from onecurve.run.metric_states import VirtualMetrics
from tests.support.pool import Pool


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


def test_a_logged_value_moves_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = SimpleNamespace(virtual_metrics=None, precision="32-true")
    monkeypatch.setattr(logged_values, "group_of_samples", lambda trainer: None)
    results = LoggedValues(trainer, training=True)
    metric = SumMetric()
    moved = list[torch.device]()
    monkeypatch.setattr(metric, "to", moved.append)
    for value in (torch.tensor(1.0), metric):
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": False, "batch_size": 1}
        for _ in range(2):
            results.log("training_step", str(type(value)), value, **options)
        result = results.result_metrics[-1]
        copied_by_lightning = result.meta
        result.to(torch.device("cpu"))
        assert result.meta is copied_by_lightning
    assert not moved
    results.to(torch.device("meta"))
    assert moved
    assert results.result_metrics[0].value.device.type == "meta"


def is_refused(values: list[float]) -> bool:
    """Return whether a process may not log its value after an evaluation on virtual ranks."""
    dist.init_process_group("gloo")
    trainer: Any = SimpleNamespace(virtual_metrics=VirtualMetrics(), precision="32-true", distributed_sampler_kwargs={})
    options: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": False, "sync_dist_group": None}
    results = LoggedValues(trainer, training=False)
    try:
        results.log("on_validation_epoch_end", "a", torch.tensor(values[dist.get_rank()]), **options, batch_size=1)
    except UserError:
        return True
    return False


@pytest.mark.parametrize(
    ("values", "refused"),
    [([1.0, 1.0], False), ([1.0, 2.0], True), ([float("nan"), 0.5], True), ([float("nan")] * 2, False)],
)
def test_processes_refuse_values_that_differ_together(values: list[float], refused: bool, pool: Pool) -> None:
    """A process that went on would wait for the others in its next collective."""
    assert pool.run(2, is_refused, values) == [refused] * 2


class LogsBetween(BoringModel):
    """Counts its passes, and logs in a hook that comes after each of them."""

    def __init__(self, is_manual: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.passes = not is_manual, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(1 if self.automatic_optimization else 2):
            self.passes += 1
            self.log(f"passes_{self.passes % 2}", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
            loss = self.layer(batch).square().mean()
            if not self.automatic_optimization:
                self.manual_backward(loss)
                self.optimizers().step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("rate", optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        kind = torch.optim.LBFGS if self.automatic_optimization else torch.optim.SGD
        return kind(self.parameters(), lr=0.01)


@pytest.mark.parametrize("is_manual", [False, True])
def test_values_of_the_first_step_stay_if_another_hook_logs(is_manual: bool, folder: Path) -> None:
    trainer = onecurve.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=folder)
    module = LogsBetween(is_manual)
    trainer.fit(module, DataLoader(RandomDataset(32, 16), batch_size=8))
    assert sum(trainer.callback_metrics[f"passes_{number}"].item() for number in range(2)) == module.passes
