"""Gradient norm and update ratio are exact, and the same under every strategy."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from src.engine.observe.csv import CSVLogger
from src.engine.observe.gradients import GradientNorms
from src.engine.run.experiment import assemble
from src.engine.utils.errors import UserError
from tests.support.comparison import TOLERANCE
from tests.support.experiments import SHORT
from tests.support.pool import Pool
from tests.support.runs import compose, fit, fit_ranks

# The norm of the clipped gradients would be 0.01.
TASK = [
    *("experiment=parity", *SHORT, "optimizer=adamw", "optimizer.lr=0.01"),
    *("trainer.max_steps=4", "trainer.limit_val_batches=0", "callbacks=[default,gradients]", "callbacks.best=null"),
    *("trainer.gradient_clip_val=0.01", "trainer.log_every_n_steps=2"),
]
NORMS = ("optim/grad_norm", "optim/update_ratio")


class Reference(L.Callback):
    """Computes both values from full tensors, in a single process."""

    def __init__(self) -> None:
        self.values: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.gradient = torch.cat(
            [weight.grad.flatten() for weight in pl_module.parameters() if weight.grad is not None]
        )
        self.before = torch.cat([weight.detach().flatten() for weight in pl_module.parameters()])

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        after = torch.cat([weight.detach().flatten() for weight in pl_module.parameters()])
        ratio = (after - self.before).norm() / self.before.norm()
        self.values.append((float(self.gradient.norm()), float(ratio)))


def logged(folder: Path) -> list[tuple[float, ...]]:
    """Return both values of each log point."""
    rows = CSVLogger(folder)._read()
    return [tuple(float(row[name]) for name in NORMS) for row in rows if NORMS[0] in row]


@pytest.fixture(scope="module")
def reference(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """Return both values of the log points of a single process: the first step, the second and the last."""
    folder, computed = tmp_path_factory.mktemp("single") / "run", Reference()
    fit(compose(folder, *small, *TASK), computed)
    expected = [computed.values[step] for step in (0, 1, 3)]
    assert logged(folder) == [pytest.approx(values, rel=1e-12) for values in expected]
    assert min(norm for norm, _ in expected) > 0.1, "it is the norm before clipping"
    assert len({ratio for _, ratio in expected}) == 3
    return expected


@pytest.mark.parametrize(
    ("devices", "overrides"),
    [
        (2, ["strategy=ddp", "strategy.shard_optimizer=true"]),
        (4, ["strategy=hsdp"]),
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
    reference: list[tuple[float, float]],
    small: list[str],
    pool: Pool,
    folder: Path,
) -> None:
    fit_ranks(compose(folder, *small, *TASK, *overrides, f"trainer.devices={devices}"), pool)
    assert logged(folder) == [pytest.approx(values, rel=TOLERANCE) for values in reference]


def test_refuses_several_optimizers(small: list[str], folder: Path) -> None:
    gan = [*small, "experiment=gan", "data=shapes", "callbacks=[default,gradients]", "callbacks.best=null"]
    trainer, module, data = assemble(compose(folder, *gan))
    with pytest.raises(UserError, match=r"callbacks.gradients is for modules with one optimizer, but .* has 2"):
        trainer.fit(module, datamodule=data)


@pytest.mark.parametrize("is_fused", [True, False])
def test_divides_by_the_loss_scale_of_a_fused_optimizer(is_fused: bool) -> None:
    """Other optimizers get gradients that Lightning has divided."""
    norms, module = GradientNorms(), L.LightningModule()
    module.weight = torch.nn.Parameter(torch.zeros(4))
    scaler = SimpleNamespace(get_scale=lambda: 1024.0)
    trainer: Any = SimpleNamespace(
        optimizers=[None],
        strategy=SimpleNamespace(reduce=lambda tensor, reduce_op: tensor),
        precision_plugin=SimpleNamespace(scaler=scaler),
        global_step=0,
        log_every_n_steps=1,
    )
    norms.setup(trainer, module, "fit")
    norms.on_fit_start(trainer, module)
    module.weight.grad = torch.full((4,), 3.0 * (1024 if is_fused else 1))
    norms.on_before_optimizer_step(trainer, module, SimpleNamespace(_step_supports_amp_scaling=is_fused))  # type: ignore[arg-type]
    assert norms._squared_grad_norm is not None
    assert math.sqrt(norms._squared_grad_norm) == 6.0
