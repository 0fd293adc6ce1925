"""The LightningModule: its loss, its precision, its checkpoints, compiled or not."""

import functools
import shutil
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from onecurve.data.batch import Batch
from onecurve.errors import UserError
from onecurve.run.experiment import assemble
from onecurve.run.module import WeightedMean
from tests.support.runs import compose, fit

MLP = ["model=mlp", "model.hidden=[16]", "data.batch_size=32", "trainer.log_every_n_steps=1", "trainer.max_epochs=1"]


def batch(count: int, weight: float) -> Batch:
    target = F.one_hot(torch.arange(count) % 10, 10).float()
    return Batch(torch.zeros(count, 3, 32, 32), target, torch.arange(count), torch.full((count,), weight))


def test_loss_is_a_weighted_sum_so_that_micro_batches_add_up(small: list[str], folder: Path) -> None:
    _, module, _ = assemble(compose(folder, *small, *MLP, "module.label_smoothing=0.1"))
    logits, full = torch.randn(8, 10), batch(8, 1 / 8)
    loss = module.loss(logits, full)  # type: ignore[operator]
    assert loss == pytest.approx(float(F.cross_entropy(logits, full.target, label_smoothing=0.1)), rel=1e-6)
    parts = [module.loss(logits[at], Batch(*(field[at] for field in full))) for at in (slice(0, 4), slice(4, 8))]  # type: ignore[operator]
    assert sum(parts) == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_means_count_beyond_the_range_of_half_precision(dtype: torch.dtype) -> None:
    """The metric has the module's type, as under Lightning; four of five of 10,000 samples are correct."""
    metric = WeightedMean().to(dtype)
    metric.reset()
    for _ in range(625):
        correct = (torch.arange(16) % 5 > 0).float()
        metric.update(correct, torch.ones(16, dtype=dtype))
    assert metric.weight == 10_000
    assert metric.compute() == pytest.approx(float((torch.arange(16) % 5 > 0).float().mean()), rel=1e-6)


def test_trains_in_each_precision(small: list[str], folder: Path) -> None:
    """Losses differ from those in float64 by the rounding of the type."""
    task = [*small, *MLP[2:], "model.width=4", "trainer.limit_train_batches=3"]
    exact = fit(compose(folder / "exact", *task, "trainer.precision=64-true"))
    assert {tensor.dtype for tensor in exact.final.values() if tensor.is_floating_point()} == {torch.float64}
    for precision, weights, least, most in (
        ("32-true", torch.float32, 1e-10, 1e-6),
        ("bf16-mixed", torch.float32, 1e-5, 1e-2),
        ("bf16-true", torch.bfloat16, 1e-5, 1e-2),
    ):
        record = fit(compose(folder / precision, *task, f"trainer.precision={precision}"))
        assert {tensor.dtype for tensor in record.final.values() if tensor.is_floating_point()} == {weights}
        differences = [abs(a - b) / b for a, b in zip(record.losses, exact.losses, strict=True)]
        assert least < max(differences) < most
        assert record.metrics["val/loss"] == pytest.approx(exact.metrics["val/loss"], rel=most)


@pytest.mark.slow
def test_compiled_network_trains_alike(small: list[str], folder: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    plain = fit(compose(folder / "plain", *small, *MLP))
    compiled = fit(compose(folder, *small, *MLP, "module.compile=true"))
    assert compiled.final.keys() == plain.final.keys()
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-4)


def test_a_network_is_compiled_as_one_graph(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
    _, module, _ = assemble(compose(folder, "model=resnet18", "module.compile=true"))
    module.setup("fit")
    module.setup("test")
    with torch.device("meta"):
        module.to("meta")(torch.empty(2, 3, 32, 32))
    products = sum("linear" in str(node.target) or "conv" in str(node.target) for node in graphs[0].graph.nodes)
    layers = sum(isinstance(part, torch.nn.Linear | torch.nn.Conv2d) for part in module.modules())
    assert len(graphs) == 1
    assert products == layers


@pytest.mark.parametrize(("option", "mode"), [("true", None), ("default", "default"), ("max-autotune", "max-autotune")])
def test_compiles_in_the_given_mode(
    option: str, mode: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str | None] = []
    logits = torch.zeros(2, 10)  # the memory of a CUDA graph's output, which each replay overwrites

    def replay(function: object, mode: str | None) -> object:
        modes.append(mode)
        return lambda image: logits

    monkeypatch.setattr(torch, "compile", replay)
    _, module, _ = assemble(compose(folder, *MLP[:2], f"module.compile={option}"))
    module.setup("fit")
    outputs = module(torch.zeros(2, 3, 32, 32))
    assert set(modes) == {mode}
    assert (outputs is logits) == (mode != "max-autotune")


def test_divergence_stops_the_run_and_names_the_last_finite_checkpoint(small: list[str], folder: Path) -> None:
    cfg = compose(folder, *small, *MLP, "trainer.max_epochs=3", "scheduler=constant")
    with pytest.raises(UserError, match=r"train/loss is nan at step 1\d: .*checkpoints, if any, are from before"):
        fit(cfg, _Explode(after=12))
    saved = torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"]
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())


def test_weights_that_are_not_finite_are_not_saved(small: list[str], folder: Path) -> None:
    cfg = compose(folder, *small, *MLP, "trainer.log_every_n_steps=1000", "trainer.max_epochs=3")
    with pytest.raises(UserError, match="is not finite"):
        fit(cfg, _Explode(after=12))
    assert torch.load(folder / "checkpoints" / "last.ckpt")["global_step"] == 11


class _Explode(L.Callback):
    """Set the weights to NaN at a step, as too high a learning rate does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        if trainer.global_step == self.after:
            for parameter in pl_module.parameters():
                parameter.data.fill_(float("nan"))
