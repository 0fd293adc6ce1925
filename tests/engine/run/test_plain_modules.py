"""LightningModules written for plain Lightning train the same on any hardware, or are refused before training."""

import copy
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

from onecurve.data.ordered_data import OrderedData
from onecurve.errors import UserError
from onecurve.run.experiment import run_experiment
from tests.support.comparison import TOLERANCE, check_resumed, distances, read_rows
from tests.support.experiments import SHORT
from tests.support.interruption import die, run_on_ranks
from tests.support.pool import Pool, RankFailed
from tests.support.runs import Record, compose, fit, fit_and_test, fit_ranks

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
AVERAGING = "+callbacks.averaging={_target_: lightning.pytorch.callbacks.EMAWeightAveraging}"
PRUNING = "+callbacks.pruning={_target_: lightning.pytorch.callbacks.ModelPruning, pruning_fn: l1_unstructured}"
UNEVEN = [*("strategy=ddp", TWO), "strategy.shares=[3,1]"]


@pytest.fixture(scope="module")
def task(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the overrides of a short run whose evaluation pads; each of MODULES is a choice of `module`."""
    conf = tmp_path_factory.mktemp("conf")
    (conf / "module").mkdir()
    for name, text in MODULES.items():
        (conf / "module" / f"{name}.yaml").write_text(text)
    search = f"hydra.searchpath=[file://{conf}]"
    return [*small, "experiment=parity", "~module.reference_batch_size", *SHORT, search, "data.val_fraction=0.13"]


@pytest.fixture(scope="module")
def reference(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> Record:
    return fit_and_test(compose(tmp_path_factory.mktemp("reference"), *task, "module=plain"))


def check_agree(records: list[Record], reference: Record) -> None:
    for record in records:
        assert max(distances(record, reference)) < TOLERANCE
        for name in ("val/acc", "val/loss", "test/acc", "test/loss"):
            if name in reference.metrics:
                assert record.metrics[name] == pytest.approx(reference.metrics[name], rel=1e-6)


@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "hsdp", "ddp_spawn"))]
)
def test_agrees_with_single_process(
    strategy: str, task: list[str], reference: Record, pool: Pool, folder: Path
) -> None:
    """Dropout depends on the samples, and 13 validation images on two ranks leave padding, which is dropped."""
    cfg = compose(folder, *task, "module=plain", f"strategy={strategy}", TWO)
    check_agree(fit_ranks(cfg, pool, test=True), reference)


def test_module_of_the_common_template(task: list[str], pool: Pool, folder: Path) -> None:
    """Rank zero's progress bar reads torchmetrics of the epoch, while the others save, which communicates as well."""
    template = [*task, "module=template", "test=false", "trainer.enable_progress_bar=true"]
    reference = fit(compose(folder / "single", *template))
    check_agree(fit_ranks(compose(folder, *template, "strategy=fsdp", TWO), pool), reference)


@pytest.mark.slow
def test_ranks_compute_metrics_together(task: list[str], pool: Pool, folder: Path) -> None:
    """As in the test before, where the run is compared, too."""
    words = [*task, "module=template", "test=false", "trainer.enable_progress_bar=true", "strategy=fsdp", TWO]
    assert all("train/loss" in record.metrics for record in fit_ranks(compose(folder, *words), pool))


def test_resumes_under_another_strategy(task: list[str], reference: Record, pool: Pool, folder: Path) -> None:
    plain = [*task, "module=plain"]
    pool.run(2, fit, compose(folder / "a", *plain, "strategy=fsdp", TWO, "trainer.max_steps=5"))
    saved = torch.load(folder / "a" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["hyper_parameters"] == {"width": 4}
    assert len(saved["optimizer_states"][0]["param_groups"]) == 3
    resumed = fit(compose(folder / "b", *plain, f"ckpt_path={folder}/a/checkpoints/last.ckpt"))
    check_resumed([resumed], reference, done=5)


@pytest.fixture(scope="module")
def accumulating(task: list[str]) -> list[str]:
    """Return the overrides of a module with metrics of many kinds."""
    return [*task, *of_class("Accumulates"), "test=false", "strategy=ddp", "trainer.max_steps=10"]


@pytest.fixture(scope="module")
def accumulated(accumulating: list[str], tmp_path_factory: pytest.TempPathFactory) -> Record:
    return fit(compose(tmp_path_factory.mktemp("accumulated"), *accumulating))


@pytest.mark.parametrize(
    ("here", "there"), [(2, 1), *(pytest.param(1, ranks, marks=pytest.mark.slow) for ranks in (1, 2))]
)
def test_metrics_accumulate_over_a_resumption(
    here: int, there: int, accumulating: list[str], accumulated: Record, pool: Pool, folder: Path
) -> None:
    """The run stops at the end of the first epoch, and within the second."""
    words, reference = accumulating, accumulated
    run_on_ranks(pool, here, fit, compose(folder / "end", *words, f"trainer.devices={here}", "trainer.max_steps=5"))
    within = compose(folder / "within", *words, f"trainer.devices={here}")
    run_on_ranks(pool, here, die, within, "on_train_batch_start", 7)
    for file in ("end/checkpoints/last.ckpt", "within/died.ckpt"):
        resumed = compose(folder / "resumed", *words, f"trainer.devices={there}", f"ckpt_path={folder}/{file}")
        for record in run_on_ranks(pool, there, fit, resumed):
            for name in ("mean_label", "label_epoch", "largest", "own_mean", "labels", "best"):
                assert record.metrics[f"train/{name}"] == pytest.approx(reference.metrics[f"train/{name}"]), (
                    file,
                    name,
                )


@pytest.mark.parametrize("step", [5, 7], ids=["between epochs", "within an epoch"])
def test_metrics_that_each_epoch_adds_are_restored(step: int, task: list[str], folder: Path) -> None:
    words = [*task, *of_class("Tracks"), "test=false", "trainer.max_steps=10"]
    reference = fit(compose(folder, *words)).metrics
    die(compose(folder / "within", *words), "on_train_batch_start", step)
    resumed = fit(compose(folder / "resumed", *words, f"ckpt_path={folder}/within/died.ckpt")).metrics
    for name in ("train/label_0", "train/label_1"):
        assert resumed[name] == pytest.approx(reference[name])


def test_names_metrics_that_are_not_restored(task: list[str], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = [*task, "test=false", "trainer.max_steps=10"]
    die(compose(folder, *words, *of_class("Accumulates")), "on_train_batch_start", 7)
    saved = torch.load(folder / "died.ckpt")
    saved["metric_states"] = {f"old_{name}": state for name, state in saved["metric_states"].items()}
    torch.save(saved, folder / "old.ckpt")
    fit(compose(folder / "resumed", *words, *of_class("Accumulates"), f"ckpt_path={folder}/old.ckpt"))
    assert "metrics of the checkpoint that this run does not have begin anew: old_training_step" in caplog.text
    assert "old_mean_label" in caplog.text
    assert "old_on_train_epoch_end" not in caplog.text


def test_metrics_of_torchmetrics_have_the_precision_of_the_run(task: list[str], folder: Path) -> None:
    """The first value too, which torchmetrics rounds to the type of the metric."""
    fit(compose(folder, *task, "module=template", "test=false", "trainer.max_steps=1", "trainer.max_epochs=1"))
    (row,) = [row for row in read_rows(folder) if row["train/loss"]]
    assert float(row["train/loss"]) != float(np.float32(row["train/loss"]))


def test_a_search_for_the_learning_rate_is_not_repeated(task: list[str], folder: Path) -> None:
    finder = "{_target_: lightning.pytorch.callbacks.LearningRateFinder, num_training_steps: 5}"
    words = [*task, *of_class("LearningRate"), "test=false", f"+callbacks.finder={finder}"]
    fit(compose(folder / "alone", *words))
    die(compose(folder / "died", *words), "on_train_batch_start", 3)
    fit(compose(folder / "died", *words, f"ckpt_path={folder}/died/died.ckpt"))
    alone, resumed = (
        [(row["step"], row["train/loss"]) for row in read_rows(folder / name)] for name in ("alone", "died")
    )
    assert alone == resumed
    assert [step for step, _ in alone] == [str(step) for step in range(8)]


def test_a_search_for_the_batch_size_is_refused(task: list[str], folder: Path) -> None:
    finder = "+callbacks.finder={_target_: lightning.pytorch.callbacks.BatchSizeFinder}"
    with pytest.raises(UserError, match="leave it out, set data"):
        fit(compose(folder, *task, finder))


def test_counts_batches_of_two_optimizers(task: list[str], folder: Path) -> None:
    words = [*task, *of_class("TwoOptimizers"), "test=false", "trainer.max_steps=-1", "trainer.max_epochs=2"]
    words += ["callbacks.checkpoint.every_n_train_steps=4", "trainer.log_every_n_steps=3"]
    fit(compose(folder / "alone", *words), test=True)
    die(compose(folder / "killed", *words), "on_train_batch_end", 2 * 8)
    last = folder / "killed" / "checkpoints" / "last.ckpt"
    assert torch.load(last)["position"]["steps"] == 5  # the end of the epoch
    fit(compose(folder / "killed", *words, f"ckpt_path={last}"), test=True)
    alone, resumed = (
        [(row["step"], row["epoch"], row["train/loss"]) for row in read_rows(folder / name)]
        for name in ("alone", "killed")
    )
    assert alone == resumed
    assert [step for step, _, _ in alone] == ["0", "2", "4", "5", "8", "9", "10"]


def test_predicts(task: list[str], images: Path, pool: Pool, folder: Path) -> None:
    """Five images on two ranks leave padding, which the table omits."""
    options = [*task, "module=plain", "fit=false", "test=false", f"predict={images}/test/class 0"]
    run_experiment(compose(folder / "one", *options))
    pool.run(2, run_experiment, compose(folder, *options, "strategy=ddp", TWO))
    table = (folder / "predictions.csv").read_text()
    assert table.count("\n") == 6
    assert table == (folder / "one" / "predictions.csv").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["strategy=ddp", TWO, "data.source.test_size=1", "fit=false"],
            "the 1 samples of `test` leave a batch of a process or virtual rank empty",
        ),
    ],
    ids=["no samples"],
)
def test_ranks_refuse(options: list[str], message: str, task: list[str], pool: Pool, folder: Path) -> None:
    with pytest.raises(RankFailed, match=message):
        pool.run(2, run_experiment, compose(folder, *task, "module=plain", *options))


def test_evaluates_on_ranks_with_different_numbers_of_samples(task: list[str], pool: Pool, folder: Path) -> None:
    evaluation = [*task, "module=plain", "fit=false"]
    alone = run_experiment(compose(folder / "one", *evaluation)).metrics
    for result in pool.run(2, run_experiment, compose(folder, *evaluation, *UNEVEN)):
        for name in ("test/loss", "test/acc"):
            assert result.metrics[name] == pytest.approx(alone[name], rel=1e-6)


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
        (
            ["strategy=pipeline"],
            "strategy=pipeline needs Plain.net, the network to split: rename its attribute, or use",
        ),
        (
            ["callbacks.best.monitor=val_acc"],
            "callbacks.best monitors val_acc, which validation does not log .it logs val",
        ),
        (["module=template", "strategy=pipeline"], "strategy=pipeline needs TemplateStyle.loss"),
        (["strategy=fsdp", AVERAGING], "EMAWeightAveraging averages a copy .* callbacks=ema, or strategy=ddp"),
        (["strategy=fsdp", PRUNING], "ModelPruning compares all weights, .*: take strategy=ddp"),
        (["module=template", "test=true"], "test=True: TemplateStyle has no test_step: add it"),
        (
            ["module._target_=tests.support.modules.OwnParameter", "strategy=fsdp"],
            "but temperature belongs to OwnParameter itself",
        ),
    ],
    ids=["no network", "no metric", "no loss", "averaging", "pruning", "no test", "own parameter"],
)
def test_refused_before_training(overrides: list[str], message: str, task: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        run_experiment(compose(folder, *task, "module=plain", *overrides))
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize("options", [["callbacks=[default,early_stopping]"], ["logger=none"]], ids=["monitor", "none"])
def test_without_validation_or_loggers(
    options: list[str], task: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = compose(folder, *task, *of_class("LogsToExperiment"), "data.val_fraction=0", "test=false", *options)
    if options == ["logger=none"]:
        cfg.logger = cfg.callbacks = None  # as in a recipe of one's own
        fit(cfg)
        return
    cfg.callbacks.early_stopping.monitor = "train/loss"
    fit(cfg)
    assert "no validation, so callbacks.best and callbacks.early_stopping cannot act" in caplog.text


def test_callbacks_set_attributes_of_the_data_module(task: list[str]) -> None:
    plain = L.LightningDataModule()
    data = OrderedData(plain, 0, {})
    data.curriculum = 2
    data.parts = data.trainer = None  # type: ignore[assignment]
    assert vars(plain)["curriculum"] == 2 == data.curriculum
    assert not hasattr(plain, "parts")
    assert copy.deepcopy(data).curriculum == 2


def of_class(name: str) -> list[str]:
    return ["module=plain", f"module._target_=tests.support.modules.{name}"]


def test_fsdp_shards_lists_of_parameters(task: list[str], pool: Pool, folder: Path) -> None:
    listed = [*task, *of_class("ListedParameters"), "trainer.max_steps=3"]
    reference = fit(compose(folder / "single", *listed))
    check_agree(pool.run(2, fit, compose(folder, *listed, "strategy=fsdp", TWO)), reference)


def test_ranks_stop_if_their_learning_rates_differ(task: list[str], pool: Pool, folder: Path) -> None:
    longer = ["trainer.max_steps=15", "trainer.max_epochs=3", "strategy=ddp", TWO]
    with pytest.raises(
        RankFailed, match=r"UserError: lr of `group 00` of optimizer 0 differs between the ranks: .* sync_dist=True"
    ):
        pool.run(2, fit, compose(folder, *task, *of_class("UnsyncedPlateau"), *longer))
