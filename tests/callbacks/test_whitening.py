"""The whitening callback computes filters from training images once, and the same on all ranks."""

from pathlib import Path

import pytest
import torch

from src.callbacks.whitening import _computing_device
from src.utils.errors import UserError
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit

NET = ["model=airbench", "model.widths=[8,8,8]", "data.batch_size=16", "trainer.max_epochs=1"]
TASK = [*NET, "callbacks=[default,whitening]", "trainer.limit_train_batches=4", "trainer.limit_val_batches=1"]
FILTERS, BIAS = "net.layer1.whitening.weight", "net.layer1.whitening.bias"


def test_every_strategy_starts_with_the_same_filters(pool: Pool, small: list[str], folder: Path) -> None:
    alone = fit(compose(folder / "alone", *small, *TASK)).initial[FILTERS]
    assert torch.equal(alone[:12], -alone[12:])
    for strategy in ("ddp", "fsdp", "pipeline"):
        cfg = compose(folder / strategy, *small, *TASK, f"strategy={strategy}", "trainer.devices=2")
        found = [record.initial[FILTERS] for record in pool.run(2, fit, cfg) if FILTERS in record.initial]
        assert found
        assert all(torch.equal(filters, alone) for filters in found)


def test_initialized_filters_are_kept(small: list[str], cifar: Path, folder: Path) -> None:
    first = fit(compose(folder, *small, *TASK)).final[FILTERS]
    others = ["data=cifar10", f"data.root={cifar}"]
    started = fit(compose(folder / "new", *others, *TASK, f"init_from={folder}/checkpoints/last.ckpt"))
    fresh = fit(compose(folder / "fresh", *others, *TASK))
    assert torch.equal(started.final[FILTERS], first)
    assert not torch.allclose(fresh.final[FILTERS], first)


def test_bias_is_trained_for_bias_fraction_of_the_run(small: list[str], folder: Path) -> None:
    def run(fraction: float) -> Record:
        options = ["optimizer.weight_decay=0", "optimizer.momentum=0", "optimizer.nesterov=false"]
        options += [f"callbacks.whitening.bias_fraction={fraction}"]
        return fit(
            compose(folder / str(fraction), *small, *TASK, *options, f"callbacks.whitening.bias_fraction={fraction}")
        )

    none, half, full = (run(fraction) for fraction in (0.0, 0.5, 1.0))
    moved = [float((record.final[BIAS] - record.initial[BIAS]).norm()) for record in (none, half, full)]
    assert moved[0] == 0 < moved[1]
    assert moved[1] != moved[2] > 0


def test_refuses_a_network_without_a_whitening_layer(small: list[str], folder: Path) -> None:
    cfg = compose(folder, *small, "callbacks=[default,whitening]")
    with pytest.raises(UserError, match="no whitening layer"):
        fit(cfg)


def test_speedrun_trains_on_all_images_without_warnings(
    small: list[str], folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    tiny = ["data.batch_size=20", "model.widths=[8,8,8]", "trainer.max_epochs=2", "trainer.log_every_n_steps=5"]
    record = fit(compose(folder, *small, "experiment=speedrun", *tiny), test=True)
    assert sorted(index for batch in record.indices[:20] for index in batch) == list(range(400))
    assert not [str(warning.message) for warning in recwarn if "DataLoader" in str(warning.message)]
    assert sorted(file.name for file in (folder / "checkpoints").iterdir()) == ["last.ckpt"], "it saves once"
    assert torch.load(folder / "checkpoints" / "last.ckpt")["global_step"] == 40
    assert {"test/acc", "test/acc_tta"} <= record.metrics.keys()
    assert not {"val/acc", "val/loss"} & record.metrics.keys()


@pytest.mark.parametrize(("root", "expected"), [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("mps", "cpu")])
def test_computes_on_cuda(root: str, expected: str) -> None:
    assert _computing_device(torch.device(root)) == torch.device(expected)
