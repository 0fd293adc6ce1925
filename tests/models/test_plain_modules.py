"""LightningModules written for plain Lightning train the same on any hardware, or are refused before training."""

from pathlib import Path

import pytest
import torch

from src.run.experiment import run
from src.utils.errors import UserError
from tests.support.comparison import TOLERANCE, check_resumed, distances
from tests.support.experiments import SHORT
from tests.support.pool import Pool, RankFailed
from tests.support.runs import Record, compose, fit, fit_ranks

PARTS = """
net: ${model}
optimizer: {_target_: torch.optim.RMSprop, _partial_: true, lr: 0.001}
scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, mode: max, patience: 0}
"""
MODULES = {
    "plain": "_target_: tests.support.modules.Plain\n",
    "template": f"_target_: tests.support.modules.TemplateStyle\n{PARTS}",
    "loss": f"_target_: tests.support.modules.WithLoss\n{PARTS}",
}
TWO = "trainer.devices=2"


@pytest.fixture
def task(small: list[str], tmp_path: Path) -> list[str]:
    """Return the overrides of a short run; `module=plain` and `module=template` are choices."""
    for name, text in MODULES.items():
        file = tmp_path / "conf" / "module" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return [
        *small,
        "experiment=parity",
        "~module.reference_batch_size",
        *SHORT,
        f"hydra.searchpath=[file://{tmp_path}/conf]",
    ]


def assert_agree(records: list[Record], reference: Record) -> None:
    for record in records:
        assert max(distances(record, reference)) < TOLERANCE
        for name in ("val/acc", "test/loss"):
            if name in reference.metrics:
                assert record.metrics[name] == pytest.approx(reference.metrics[name], rel=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "ddp_spawn"])
def test_agrees_with_single_process(strategy: str, task: list[str], pool: Pool, folder: Path) -> None:
    plain = [*task, "module=plain"]
    reference = fit(compose(folder / "single", *plain))
    assert_agree(fit_ranks(compose(folder, *plain, f"strategy={strategy}", TWO), pool), reference)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_module_of_the_common_template(strategy: str, task: list[str], pool: Pool, folder: Path) -> None:
    template = [*task, "module=template", "test=false"]
    reference = fit(compose(folder / "single", *template))
    assert_agree(fit_ranks(compose(folder, *template, f"strategy={strategy}", TWO), pool), reference)


def test_resumes_under_another_strategy(task: list[str], pool: Pool, folder: Path) -> None:
    plain = [*task, "module=plain"]
    reference = fit(compose(folder / "full", *plain))
    pool.run(2, fit, compose(folder / "a", *plain, "strategy=fsdp", TWO, "trainer.max_steps=5"))
    saved = torch.load(folder / "a" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["hyper_parameters"] == {"width": 4}
    assert len(saved["optimizer_states"][0]["param_groups"]) == 3
    resumed = fit(compose(folder / "b", *plain, f"ckpt_path={folder}/a/checkpoints/last.ckpt"))
    check_resumed([resumed], reference, done=5)


def test_weights_only_checkpoint_can_be_read(task: list[str], folder: Path) -> None:
    """Lightning calls no callback for it; the hyper-parameters contain the network."""
    options = ["module=template", "test=false", "+callbacks.best.save_weights_only=true", "trainer.max_epochs=1"]
    fit(compose(folder, *task, *options))
    saved = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    assert saved["hyper_parameters"] == {"compile": False}
    assert "optimizer_states" not in saved


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=pipeline"], "strategy=pipeline needs Plain.net, the network to split"),
        (
            ["callbacks.best.monitor=val_acc"],
            "callbacks.best monitors val_acc, which validation does not log .it logs val",
        ),
        (["module=template", "strategy=pipeline"], "strategy=pipeline needs TemplateStyle.loss"),
        (["module=template", "test=true"], "test=True: TemplateStyle has no test_step; add one, or set test=false"),
        (["module=loss", "strategy=pipeline"], "strategy=pipeline needs WithLoss.takes_batch"),
    ],
    ids=["no network", "no metric", "no loss", "no test", "no Batch"],
)
def test_refused_before_training(overrides: list[str], message: str, task: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        run(compose(folder, *task, "module=plain", *overrides))
    assert not (folder / "checkpoints").exists()


def of_class(name: str) -> list[str]:
    return ["module=plain", f"module._target_=tests.support.modules.{name}"]


def test_fsdp_refuses_a_parameter_of_the_module_itself(task: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match="but temperature belongs to OwnParameter itself"):
        run(compose(folder, *task, *of_class("OwnParameter"), "strategy=fsdp"))


def test_fsdp_shards_lists_of_parameters(task: list[str], pool: Pool, folder: Path) -> None:
    listed = [*task, *of_class("ListedParameters"), "trainer.max_steps=3"]
    reference = fit(compose(folder / "single", *listed))
    assert_agree(pool.run(2, fit, compose(folder, *listed, "strategy=fsdp", TWO)), reference)


def test_ranks_stop_if_their_learning_rates_differ(task: list[str], pool: Pool, folder: Path) -> None:
    longer = ["trainer.max_steps=15", "trainer.max_epochs=3", "strategy=ddp", TWO]
    with pytest.raises(RankFailed, match="val/acc and so the learning rate differ between the ranks"):
        pool.run(2, fit, compose(folder, *task, *of_class("UnsyncedPlateau"), *longer))
