"""The gradient norm is exact, and the same under every strategy."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from onecurve.observe.gradients import _gradient_scale
from tests.support.comparison import TOLERANCE, read_rows
from tests.support.experiments import SHORT
from tests.support.pool import Pool
from tests.support.runs import compose, fit, fit_ranks

# The norm of the clipped gradients would be 0.01.
TASK = [
    *("experiment=parity", *SHORT, "optimizer=adamw", "optimizer.lr=0.01"),
    *("trainer.max_steps=4", "trainer.limit_val_batches=0", "callbacks=[default,gradients]", "callbacks.best=null"),
    *("trainer.gradient_clip_val=0.01", "trainer.log_every_n_steps=2"),
]


class Reference(L.Callback):
    """Computes the norm from full tensors, in a single process."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        gradients = [weight.grad.flatten() for weight in pl_module.parameters() if weight.grad is not None]
        self.norms.append(float(torch.cat(gradients).norm()))


def logged(folder: Path) -> list[float]:
    """Return the norm of each log point."""
    return [float(row["optim/grad_norm"]) for row in read_rows(folder) if row["optim/grad_norm"]]


@pytest.fixture(scope="module")
def reference(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the norms of the log points of a single process: the first step, the second and the last."""
    folder, computed = tmp_path_factory.mktemp("single") / "run", Reference()
    fit(compose(folder, *small, *TASK), computed)
    expected = [computed.norms[step] for step in (0, 1, 3)]
    assert logged(folder) == pytest.approx(expected, rel=1e-12)
    assert min(expected) > 0.1, "it is the norm before clipping"
    return expected


@pytest.mark.parametrize(
    ("devices", "overrides"),
    [
        (2, ["strategy=ddp", "strategy.shard_optimizer=true"]),
        pytest.param(4, ["strategy=hsdp"], marks=pytest.mark.slow),
        (
            4,
            [
                "strategy=hybrid",
                "strategy.data_parallel=fsdp",
                "strategy.schedule=interleaved_1f1b",
                "strategy.stages=2",
            ],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_same_values_under_every_strategy(
    devices: int,
    overrides: list[str],
    reference: list[float],
    small: list[str],
    pool: Pool,
    folder: Path,
) -> None:
    fit_ranks(compose(folder, *small, *TASK, *overrides, f"trainer.devices={devices}"), pool)
    assert logged(folder) == pytest.approx(reference, rel=TOLERANCE)


@pytest.mark.parametrize("is_fused", [True, False])
def test_divides_by_the_loss_scale_of_a_fused_optimizer(is_fused: bool) -> None:
    """Other optimizers get gradients that Lightning has divided."""
    optimizer: Any = SimpleNamespace(param_groups=[{}, {"fused": is_fused}])
    trainer: Any = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=SimpleNamespace(get_scale=lambda: 1024.0)))
    assert _gradient_scale(trainer, optimizer) == (1024.0 if is_fused else 1.0)
