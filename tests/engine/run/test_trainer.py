"""`onecurve.Trainer` in scripts: any Lightning project gets one learning curve, without the template."""

import copy
import csv
import logging.handlers
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringModel,
    RandomDataset,
    RandomIterableDataset,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from omegaconf import OmegaConf
from torch.utils.data import BatchSampler, DataLoader, Subset, TensorDataset, random_split
from torchmetrics import MeanMetric, MetricTracker, SumMetric

import onecurve
from onecurve.data import rank_loader
from onecurve.errors import UserError
from onecurve.identity.option_kinds import experiment_options
from onecurve.observe.csv import CSVLogger
from onecurve.records.events import append_event, read_events
from onecurve.run.saving import LastCheckpoint
from onecurve.run.script import _describe_options
from tests.support.commands import ROOT
from tests.support.comparison import check_last_checkpoints
from tests.support.pool import Pool, RankFailed

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "seed": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


def trainer(folder: Path, **options: Any) -> onecurve.Trainer:
    return onecurve.Trainer(default_root_dir=folder, **QUIET | options)


def loader(samples: int = 64) -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, samples), batch_size=8, shuffle=True)


class Boring(BoringModel):
    """Logs its loss, as a module of a project does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self(batch))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self(batch)))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(self(batch)))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the script of engine/README.md in a folder outside of the project."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "engine" / "README.md").read_text(), re.DOTALL)
    file = tmp_path_factory.mktemp("script") / "demo.py"
    file.write_text(script)
    return file


def run_demo(file: Path, *arguments: object, launcher: tuple[str, ...] = ()) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(ROOT / "engine")  # where `pip install ./engine` would put it
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(file), *map(str, arguments)]
    done = subprocess.run(command, cwd=file.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


class FourPerBatch(BoringDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 16), batch_size=4)


def run_cli(folder: Path, stage: str, *options: str) -> None:
    words = [stage, "--trainer.accelerator=cpu", f"--trainer.default_root_dir={folder}", "--optimizer=Adam", *options]
    with mock.patch.dict(os.environ):  # it seeds the process
        LightningCLI(BoringModel, FourPerBatch, trainer_class=onecurve.Trainer, seed_everything_default=0, args=words)


def test_lightning_cli(pool: Pool, folder: Path) -> None:
    run_cli(folder, "fit", "--trainer.max_epochs=1")
    two = ["--trainer.strategy=ddp", "--trainer.devices=2"]
    pool.run(2, run_cli, folder, "fit", *two, "--trainer.max_epochs=2", "--ckpt_path=last")
    run_cli(folder, "test", "--ckpt_path=last")
    found = {name: OmegaConf.load(folder / f"{name}.yaml") for name in ("cli_fit", "cli_test", "config")}
    assert found["cli_fit"].trainer.max_epochs == found["config"].trainer.max_epochs == 2
    assert found["cli_fit"].optimizer.class_path == "torch.optim.Adam"
    assert [one["event"] for one in read_events(folder)] == ["start", "finished", "resume", "finished"]


def test_another_writer_of_checkpoints_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^plugins=AsyncCheckpointIO\(\): the trainer writes each checkpoint itself"):
        trainer(folder, plugins=[AsyncCheckpointIO()])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
@pytest.mark.parametrize("precision", ["64-true", "64", 64])
def test_double_precision_has_three_names(strategy: str, precision: Any, folder: Path) -> None:
    """Lightning's own check would refuse each of them with strategies that shard or split a network."""
    assert trainer(folder, strategy=strategy, precision=precision).precision == "64-true"


@pytest.mark.parametrize("left", [None, "3"])
def test_equal_bits_have_one_number_of_threads(left: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's launchers set another one if the variable is missing, which a later trainer would take."""
    given, before = os.environ.get("OMP_NUM_THREADS", "1"), torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", left or "")  # what the run leaves is undone, also where there was none
    if not left:
        monkeypatch.delenv("OMP_NUM_THREADS")
    used = list[str]()

    def note(*_: Any) -> None:
        used.extend([str(torch.get_num_threads()), os.environ["OMP_NUM_THREADS"]])

    torch.set_num_threads(3)
    callback = L.pytorch.callbacks.LambdaCallback(on_train_batch_end=note, on_test_batch_end=note)
    one = trainer(folder, strategy="ddp", bit_exact=True, callbacks=callback)
    module = Boring()
    one.fit(module, loader())
    assert (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")) == (3, left), "as before"
    one.test(module, loader())
    torch.set_num_threads(before)
    assert set(used) == {given}


WITHOUT_HYDRA = """
import onecurve, runpy, sys
onecurve.Trainer, onecurve.Pipeline
assert "hydra" not in sys.modules
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_demo_here(file: Path, *arguments: object) -> None:
    """Run the script inside this process, a rank of the pool or its only one."""
    argv, logger = sys.argv, logging.getLogger("onecurve")
    os.chdir(file.parent)
    sys.argv = [str(file), *map(str, arguments)]
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.argv, logger.handlers, logger.propagate, logger.level = argv, [], True, logging.NOTSET
        os.chdir(ROOT)


@pytest.fixture(scope="module")
def one(demo: Path) -> Path:
    run_demo_here(demo, "auto", 1, "one")
    return demo.parent / "one"


@pytest.mark.parametrize(
    "strategy", ["pipeline", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp"))]
)
def test_the_script_of_the_readme_has_the_same_bits(strategy: str, demo: Path, one: Path) -> None:
    """To import the trainer and the strategies needs no Hydra."""
    run_demo(demo, strategy, 2, strategy, launcher=("-c", WITHOUT_HYDRA))
    check_last_checkpoints(one, demo.parent / strategy, tolerance=0)


@pytest.mark.slow
def test_ranks_of_torchrun_have_the_same_bits(demo: Path, one: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run_demo(demo, "ddp", 2, "torchrun", launcher=torchrun)
    check_last_checkpoints(one, demo.parent / "torchrun", tolerance=0)


def test_a_script_goes_on_elsewhere(demo: Path, one: Path, pool: Pool) -> None:
    """Train one epoch on two processes, then the other ones on one."""
    script = demo.read_text()
    short = demo.with_name("short.py")
    short.write_text(script.replace("max_epochs=3", "max_epochs=1"))
    pool.run(2, run_demo_here, short, "ddp", 2, "continued")
    run_demo_here(demo, "auto", 1, "continued")
    check_last_checkpoints(one, demo.parent / "continued", tolerance=0)


def test_a_class_in_a_block_of_a_script(demo: Path) -> None:
    """Its source is indented."""
    lines = demo.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("class Demo"))
    end = next(number for number, line in enumerate(lines) if line.startswith("if __name__"))
    block = [f"    {line}" for line in lines[start:end]]
    script = demo.with_name("block.py")
    script.write_text("\n".join([*lines[:start], lines[end], *block, *lines[end + 1 :]]))
    run_demo_here(script, "auto", 1, "block")


@pytest.mark.slow
def test_a_spawned_script_is_the_same_experiment(demo: Path, one: Path) -> None:
    """The script has another name in a spawned process."""
    run_demo(demo, "ddp_spawn", 2, "spawned")
    saved = [torch.load(folder / "checkpoints" / "last.ckpt") for folder in (one, demo.parent / "spawned")]
    assert saved[0]["experiment"] == saved[1]["experiment"]


def test_loaders_and_stages(folder: Path) -> None:
    one = trainer(folder, bit_exact=True)
    one.fit(Boring(), loader(), loader(32))
    one.validate(dataloaders=loader(32), verbose=False)
    one.test(dataloaders=loader(32), verbose=False)
    predictions = one.predict(dataloaders=loader(16))
    assert {"train_loss", "val_loss", "test_loss"} <= one.final_metrics.keys()
    assert sum(len(batch) for batch in predictions) == 16


class Measured(BoringModel):
    """Has a metric, whose value of each step it logs; it predicts its input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mean, self.val_mean = MeanMetric(**options), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean(batch[:, 0])
        self.log("mean", self.mean, on_step=True, on_epoch=False)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_mean(batch[:, 0])
        self.log("val_mean", self.val_mean)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[:, 0]


def test_predictions_of_one_process_have_the_order_of_the_dataset(folder: Path) -> None:
    inputs: Any = torch.arange(50.0)[:, None].expand(-1, 32)
    predictions = trainer(folder).predict(Measured(), DataLoader(inputs, batch_size=8))
    assert torch.cat(predictions).tolist() == [*range(50)]


class Indices(BasePredictionWriter):
    """Keeps the indices that a writer gets."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *_: Any) -> None:
        assert prediction.tolist() == batch_indices
        self.batches.append(batch_indices)

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        assert batch_indices == [self.batches]


def test_a_prediction_writer_gets_the_positions_of_its_samples(folder: Path) -> None:
    inputs: Any = torch.arange(16.0)[:, None].expand(-1, 32)
    writer = Indices()
    trainer(folder, callbacks=[writer]).predict(Measured(), DataLoader(inputs, batch_size=8))
    assert writer.batches == [[*range(8)], [*range(8, 16)]]


@pytest.mark.parametrize("bit_exact", [False, True])
def test_a_later_validation_has_all_samples(bit_exact: bool, folder: Path) -> None:
    """Metrics of virtual ranks begin again after a fit, whose validation has ended them."""
    one = trainer(folder, bit_exact=bit_exact)
    inputs: Any = torch.arange(50.0)[:, None].expand(-1, 32)
    samples = DataLoader(inputs, batch_size=8)
    one.fit(Measured(), loader(), samples)
    fitted = one.callback_metrics["val_mean"].item()
    validated = [one.validate(dataloaders=samples, verbose=False)[0]["val_mean"] for _ in range(2)]
    assert [fitted, *validated] == [24.5] * 3


def validate_around_a_fit(folder: Path, devices: int) -> list[float]:
    """Return a value logged by validations before, in and after a fit, and in and after a second fit."""
    one = trainer(folder, strategy="ddp", devices=devices, bit_exact=True)
    # What is drawn after a stage depends on the stages that this process has had.
    module, samples, training = Boring(), DataLoader(RandomDataset(32, 32), batch_size=8), loader()

    def validate() -> float:
        return one.validate(module, samples, verbose=False)[0]["val_loss"]

    def fit() -> float:
        one.fit(module, training, samples, ckpt_path="last")
        one.fit_loop.max_epochs = 2
        return one.callback_metrics["val_loss"].item()

    return [validate(), fit(), validate(), fit(), validate()]


def test_each_validation_of_a_trainer_has_the_samples_of_all_processes(pool: Pool, folder: Path) -> None:
    """The means of a loop stay from one validation to the next, between those of another loop."""
    values = validate_around_a_fit(folder / "one", 1)
    assert values[1::2] == values[2::2]
    assert pool.run(2, validate_around_a_fit, folder / "two", 2) == [values] * 2


class MeasuredByHand(Measured):
    """Optimizes manually."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        optimizer.step()


def log_steps(folder: Path, sync: bool, kind: type[Measured] = Measured) -> tuple[list[float], bool]:
    """Return the values of the steps, and whether the log has a warning."""
    messages = logging.handlers.BufferingHandler(100)
    logging.getLogger("onecurve").addHandler(messages)
    try:
        trainer(folder, strategy="ddp", devices=2).fit(kind(dist_sync_on_step=sync), loader())
    finally:
        logging.getLogger("onecurve").removeHandler(messages)
    is_warned = any("the value of a step is that of rank zero's samples" in one.msg for one in messages.buffer)
    dist.barrier()
    return columns(folder, "mean"), is_warned


def columns(folder: Path, name: str) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def test_a_metric_of_a_step_is_that_of_all_ranks_or_there_is_a_warning(pool: Pool, folder: Path) -> None:
    trainer(folder / "one").fit(Measured(), loader())
    own, warned = pool.run(2, log_steps, folder / "own", False)[0]
    synced, warned_in_vain = pool.run(2, log_steps, folder / "synced", True)[0]
    assert columns(folder / "one", "mean") == pytest.approx(synced, rel=1e-5)
    assert own != pytest.approx(synced, rel=1e-2)
    assert (warned, warned_in_vain) == (True, False)
    by_hand, warned = pool.run(2, log_steps, folder / "hand", False, MeasuredByHand)[0]
    assert (by_hand == pytest.approx(own, rel=1e-5), warned) == (True, True)


def test_torchrun_starts_as_many_processes_as_there_are_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(folder)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun has started 2 processes, but devices=1 and num_nodes=1: give the tr"):
        one.prepare_module(Boring())


def test_a_tracker_of_metrics_is_refused_with_equal_bits(folder: Path) -> None:
    module = Boring()
    module.best = MetricTracker(MeanMetric(), maximize=True)
    with pytest.raises(UserError, match="bit_exact=true: best is a MetricTracker, whose copies"):
        trainer(folder, bit_exact=True).fit(module, loader())
    callback: Any = L.Callback()
    callback.best = MetricTracker(MeanMetric(), maximize=True)
    with pytest.raises(UserError, match=r"bit_exact=true: callback Callback 0\.best is a MetricTracker"):
        trainer(folder, bit_exact=True, callbacks=[callback]).fit(Boring(), loader())


class Counting(Boring):
    """Counts its steps by a metric, and fails once within the pass of a virtual rank."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.fails = SumMetric(), False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count.update(1)
        self.log("count", self.count, on_step=False, on_epoch=True)
        if self.fails and batch_idx == 1 and self.trainer.virtual_metrics._current == 2:
            raise RuntimeError("fails")
        return super().training_step(batch, batch_idx)


def test_metrics_of_virtual_ranks_begin_anew_after_an_error(folder: Path) -> None:
    """As in a notebook, where the same trainer fits again; Lightning has not torn down its callbacks."""
    one, module = trainer(folder, bit_exact=True), Counting()
    module.fails = True
    with pytest.raises(RuntimeError, match="fails"):
        one.fit(module, loader())
    module.fails = False
    one.fit(module, loader())
    assert one.callback_metrics["count"] == 8 * 4


@pytest.mark.parametrize("options", [{"devices": 2}, {"bit_exact": True}, {"accumulate_grad_batches": 2}])
def test_sparse_gradients_are_refused_where_gradients_are_added(options: dict[str, Any], folder: Path) -> None:
    module: Any = Boring()
    module.max_norm, module.sparse = 1.0, True  # options of the module itself, such as the norm by which it clips
    trainer(folder, **options).prepare_module(module)
    module.words = torch.nn.Embedding(4, 2, sparse=True)
    trainer(folder).prepare_module(module)
    with pytest.raises(
        UserError, match=r"words has sparse=True, .* set sparse=False, or train undivided on one device"
    ):
        trainer(folder, **options).prepare_module(module)


def test_lightnings_names_of_unused_parameters(folder: Path) -> None:
    for name, is_looked_for in (("true", True), ("false", False)):
        one = trainer(folder, strategy=f"ddp_find_unused_parameters_{name}", devices=2)
        assert isinstance(one.strategy, onecurve.DDP)
        assert one.strategy.ddp_options["find_unused_parameters"] == is_looked_for


def test_a_loss_that_is_a_layer(folder: Path) -> None:
    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss()

    with pytest.raises(
        UserError, match=r"strategy=pipeline calls Classifier\.loss\(outputs, batch\), which is a layer"
    ):
        trainer(folder, strategy="pipeline", devices=2).prepare_module(Classifier())


def test_data_modules_and_the_loaders_of_a_module(folder: Path) -> None:
    class OwnLoaders(Boring):
        def __init__(self) -> None:
            super().__init__()
            self.stages: list[str] = []

        def setup(self, stage: str) -> None:
            self.stages.append(str(self.trainer.state.fn.value))

        def train_dataloader(self) -> Any:
            return DataLoader(RandomDataset(32, 64), batch_size=8)

    data = BoringDataModule()
    one = trainer(folder)
    one.fit(Boring(), data, weights_only=True)  # a DataModule in the place of a loader, as Lightning takes it
    assert one.datamodule is one.ordered_data(data)
    other, module = trainer(folder.with_name("own")), OwnLoaders()
    other.fit(module)
    assert other.global_step == 8
    other.test(module, BoringDataModule(), verbose=False)
    assert module.stages == ["fit", "test"]


@pytest.mark.parametrize("of_callback", [False, True])
def test_a_url_is_no_folder(of_callback: bool, folder: Path) -> None:
    """It would become a folder of that name in the working directory."""
    saver = ModelCheckpoint(folder)
    saver.dirpath = "s3://bucket/run"  # its constructor connects
    options: dict[str, Any] = {"callbacks": [saver]} if of_callback else {"default_root_dir": saver.dirpath}
    with pytest.raises(UserError, match=r"(ModelCheckpoint\.dirpath|default_root_dir)=s3://bucket/run is no folder"):
        onecurve.Trainer(**QUIET, **options)


def test_a_run_is_not_overwritten(folder: Path) -> None:
    trainer(folder).fit(Boring(), loader())
    rows = (folder / "metrics.csv").read_text()
    with pytest.raises(UserError, match=r"holds a run: continue it by fit\(ckpt_path=.last.\), or give"):
        trainer(folder).fit(Boring(), loader())
    assert (folder / "metrics.csv").read_text() == rows
    longer = trainer(folder, max_epochs=2)
    longer.fit(Boring(), loader(), ckpt_path="last")
    assert longer.global_step == 16
    assert (folder / "metrics.csv").read_text().startswith(rows)


def test_a_test_in_another_process_joins_the_row_of_its_step(folder: Path) -> None:
    trainer(folder).fit(Boring(), loader())
    assert columns(folder, "epoch")[-1] == 0
    trainer(folder).test(Boring(), loader(32), ckpt_path="last", verbose=False)
    rows = [*csv.DictReader((folder / "metrics.csv").open())]
    assert [(row["step"], row["epoch"]) for row in rows if row["test_loss"]] == [("8", "1")]


def test_the_rows_of_a_learning_rate_monitor_are_those_without_the_interruption(folder: Path) -> None:
    texts = []
    for name, ends in (("at-once", [16]), ("twice", [12, 16])):
        for steps in ends:
            one = trainer(folder / name, max_steps=steps, max_epochs=-1, callbacks=[LearningRateMonitor()])
            one.fit(Boring(), loader(), ckpt_path="last")
        texts.append((folder / name / "metrics.csv").read_text())
    assert texts[0] == texts[1]
    assert "lr-SGD" in texts[0]


def test_early_stopping_is_part_of_the_experiment(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stop(patience: int) -> list[L.Callback]:
        return [EarlyStopping("val_loss", patience=patience)]

    trainer(folder, callbacks=stop(1)).fit(Boring(), loader(), loader(32))
    with caplog.at_level(logging.INFO, "onecurve"):
        logging.getLogger("onecurve").addHandler(caplog.handler)
        trainer(folder, callbacks=stop(2), max_epochs=2).fit(Boring(), loader(), loader(32), ckpt_path="last")
        logging.getLogger("onecurve").removeHandler(caplog.handler)
    assert "callbacks.EarlyStopping.patience=1 (now 2)" in caplog.text


def validate_unreduced(folder: Path, module: L.LightningModule) -> str:
    """Return the messages of a run whose ranks have different values of `val_loss`."""
    messages = logging.handlers.BufferingHandler(100)
    logging.getLogger("onecurve").addHandler(messages)
    try:
        stop = EarlyStopping("val_loss")
        trainer(folder, strategy="ddp", devices=2, callbacks=[stop]).fit(
            copy.deepcopy(module),
            loader(),
            loader(32),  # the ranks share the memory of what they are sent
        )
    finally:
        logging.getLogger("onecurve").removeHandler(messages)
    return "\n".join(one.getMessage() for one in messages.buffer)


def test_a_monitor_that_is_of_one_rank_is_named_before_training(pool: Pool, folder: Path) -> None:
    expected = "EarlyStopping monitors val_loss, which each rank has of its own samples: log it with sync_dist=True"
    assert all(expected in text for text in pool.run(2, validate_unreduced, folder, Boring()))
    with pytest.raises(RankFailed, match="ReduceLROnPlateau monitors val_loss, which each rank has of its own samples"):
        pool.run(2, validate_unreduced, folder / "plateau", Plateau())


def go_on_unreduced(folder: Path) -> None:
    trainer(folder, strategy="ddp", devices=2, max_epochs=2).fit(Plateau(), loader(), loader(32), ckpt_path="last")


def test_a_run_that_goes_on_for_one_validation_compares_the_ranks(pool: Pool, folder: Path) -> None:
    """Lightning has no sanity check there, nor a later step at which the learning rates would differ."""
    trainer(folder).fit(Plateau(), loader(), loader(32))
    with pytest.raises(RankFailed, match="ReduceLROnPlateau monitors val_loss, which each rank has of its own samples"):
        pool.run(2, go_on_unreduced, folder)


class Plateau(Boring):
    """Lowers its rate by a metric of validation."""

    def __init__(self, monitor: str = "val_loss") -> None:
        super().__init__()
        self.monitor = monitor

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.monitor}}


def test_a_schedule_without_its_metric_is_found_before_the_first_epoch(folder: Path) -> None:
    with pytest.raises(UserError, match="ReduceLROnPlateau monitors val_loss, but the run has no validation"):
        trainer(folder, limit_val_batches=0).fit(Plateau(), loader())
    with pytest.raises(UserError, match=r"Plateau monitors val_acc, which .* `monitor` to one of these, .*is better$"):
        trainer(folder).fit(Plateau("val_acc"), loader(), loader(32))
    assert not (folder / "checkpoints").exists()


class Normalizing(Boring):
    """Has batch normalization, for which StochasticWeightAveraging trains an epoch more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = torch.nn.Sequential(torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 2))


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        (EMAWeightAveraging, Boring),
        (partial(StochasticWeightAveraging, 0.1, 1), Boring),
        (partial(StochasticWeightAveraging, 0.1, 1), Normalizing),
    ],
)
def test_a_run_that_has_ended_is_tested_with_the_same_averaged_weights(kind: Any, module: Any, folder: Path) -> None:
    """Lightning puts them into the module after the last checkpoint."""
    losses, data = [], loader()
    for _ in range(2):
        again = trainer(folder, max_epochs=3, callbacks=[kind()])
        again.fit(module(), data, ckpt_path="last")
        losses += again.test(dataloaders=data, verbose=False)
    assert losses[0] == losses[1]


def test_a_callback_that_has_averaged_nothing_leaves_the_weights_of_a_run_that_has_ended(folder: Path) -> None:
    losses, data = [], loader()
    for callbacks in ([], [StochasticWeightAveraging(0.1, 1)]):
        again = trainer(folder, callbacks=callbacks)
        again.fit(Boring(), data, ckpt_path="last")
        losses += again.test(dataloaders=data, verbose=False)
    assert losses[0] == losses[1]


def test_a_run_whose_time_was_over_goes_on_with_more(folder: Path) -> None:
    for epochs, time in ((1, {"minutes": 1}), (2, {"minutes": 2})):
        again = trainer(folder, max_epochs=epochs, max_time=time)
        again.fit(Boring(), loader(), ckpt_path="last")
    assert again.current_epoch == 2


def fit_on_a_rank(folder: Path) -> None:
    node = folder / os.environ["RANK"]  # which has a file system of its own
    trainer(node, strategy="ddp", devices=2, max_epochs=2).fit(Boring(), loader(), ckpt_path="last")


def test_processes_that_find_different_checkpoints_do_not_wait_for_each_other(pool: Pool, folder: Path) -> None:
    trainer(folder / "0").fit(Boring(), loader())
    with pytest.raises(RankFailed, match=r"found different checkpoints \(last.ckpt, None\)"):
        pool.run(2, fit_on_a_rank, folder)


class TwoValidations(Boring):
    """Logs a loss of each of several loaders, and a value of all."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("val_epoch", 1.0)


def test_a_callback_follows_one_of_several_validation_loaders(folder: Path) -> None:
    stop = EarlyStopping("val_loss/dataloader_idx_1")
    trainer(folder, callbacks=[stop]).fit(TwoValidations(), loader(), [loader(32), loader(32)])
    assert stop.best_score < float("inf")


@pytest.mark.parametrize(
    ("monitor", "mode", "is_named"),
    [
        ("val_loss", "max", True),
        ("val/acc", "min", True),
        ("val_loss", "min", False),
        ("val_acc", "max", False),
        ("val_iou", "max", False),
        ("val_loss_scale", "max", False),
        ("val_inaccuracy", "min", False),
    ],
)
def test_a_callback_that_would_keep_the_worst_is_named(
    monitor: str, mode: str, is_named: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(folder, callbacks=[ModelCheckpoint(monitor=monitor, mode=mode)])
    assert (f"ModelCheckpoint monitors {monitor} with mode={mode}: set mode=" in caplog.text) == is_named


def test_the_events_of_a_script(folder: Path) -> None:
    class Dies(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            raise RuntimeError("broken\nand more")

    trainer(folder).fit(Boring(), loader())
    with pytest.raises(RuntimeError):
        trainer(folder, max_epochs=2, callbacks=[Dies()]).fit(Boring(), loader(), ckpt_path="last")
    assert (read_events(folder)[-1]["event"], read_events(folder)[-1]["reason"]) == ("failed", "RuntimeError: broken")
    (folder / "events.jsonl").write_text((folder / "events.jsonl").read_text().rpartition('{"time"')[0])  # as of a kill
    trainer(folder, max_epochs=2).fit(Boring(), loader(), ckpt_path="last")
    found = [(event["event"], event["step"]) for event in read_events(folder)]
    assert found == [("start", 0), ("finished", 8), ("resume", 8), ("killed", 16), ("resume", 8), ("finished", 16)]


def test_the_end_has_a_step_that_was_not_logged(folder: Path) -> None:
    trainer(folder).fit(BoringModel(), loader())
    assert [(event["event"], event["step"]) for event in read_events(folder)] == [("start", 0), ("finished", 8)]


def test_a_script_goes_on_from_the_checkpoint_before_a_corrupt_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, epochs in (("cut", 2), ("undisturbed", 3)):
        trainer(folder / name, max_epochs=epochs).fit(Boring(), loader())
    last = folder / "cut" / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    trainer(folder / "cut", max_epochs=3).fit(Boring(), loader(), ckpt_path="last")
    assert "last.ckpt is not a complete checkpoint" in capsys.readouterr().err
    check_last_checkpoints(folder / "cut", folder / "undisturbed", tolerance=0)
    assert columns(folder / "cut", "train_loss") == columns(folder / "undisturbed", "train_loss")
    for file in last.parent.iterdir():
        file.write_bytes(b"")
    with pytest.raises(onecurve.CheckpointUserError, match=r"last.ckpt is not a complete checkpoint"):
        trainer(folder / "cut", max_epochs=4).fit(Boring(), loader(), ckpt_path="last")


def test_an_evaluation_leaves_the_events_of_a_run_alone(folder: Path) -> None:
    """Another process may train in that folder."""
    trainer(folder).fit(Boring(), loader())
    before = read_events(folder)
    trainer(folder).test(Boring(), loader(), ckpt_path="last")
    assert read_events(folder) == before


def test_a_home_folder_is_one_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    home = Path("~/run")
    trainer(home).fit(Boring(), loader())
    for epochs, path in ((2, "last"), (3, home), (4, "~/run/checkpoints/last.ckpt")):
        trainer(home, max_epochs=epochs).fit(Boring(), loader(), ckpt_path=path)
    with pytest.raises(UserError, match="holds a run"):
        trainer(home).fit(Boring(), loader())
    events = [event["event"] for event in read_events(folder / "run")]
    assert events == ["start", "finished", *["resume", "finished"] * 3]


def test_a_corrupt_checkpoint_does_not_begin_the_run_anew(folder: Path) -> None:
    trainer(folder).fit(Boring(), loader())
    (folder / "checkpoints" / "last.ckpt").write_bytes(b"cut")
    with pytest.raises(onecurve.CheckpointUserError, match="is not a complete checkpoint"):
        trainer(folder, max_epochs=2).fit(Boring(), loader(), ckpt_path="last")


def test_what_another_run_has_left_is_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def best() -> list[L.Callback]:
        return [ModelCheckpoint(monitor="val_loss", filename="best")]

    trainer(folder / "a", callbacks=best()).fit(Boring(), loader(), loader(32))
    trainer(folder / "b", seed=1).fit(Boring(), loader())
    last, rows = folder / "a" / "checkpoints" / "last.ckpt", (folder / "b" / "metrics.csv").read_text()
    with pytest.raises(UserError, match="b holds a run"):
        trainer(folder / "b", max_epochs=2).fit(Boring(), loader(), ckpt_path=last)
    assert (folder / "b" / "metrics.csv").read_text() == rows
    caplog.clear()
    later = trainer(folder / "c", max_epochs=2, callbacks=best())
    later.fit(Boring(), loader(), loader(32), ckpt_path=last)
    assert f"the best checkpoint of the run of {last} stays there" in caplog.text


def test_an_option_of_a_class_may_be_hardware(folder: Path) -> None:
    class Data(BoringDataModule):
        def __init__(self, n_jobs: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    trainer(folder).fit(Boring(), datamodule=Data(1))
    again = trainer(folder, max_epochs=2)
    with pytest.raises(UserError, match=r"had data.n_jobs=1 .*, or name data.n_jobs in `hardware_options` of its"):
        again.fit(Boring(), datamodule=Data(2), ckpt_path="last")


def test_another_experiment_is_refused(folder: Path) -> None:
    trainer(folder).fit(Boring(), loader())
    with pytest.raises(UserError, match=r"the run in ckpt_path had seed=None \(now 1\)|had seed=0 \(now 1\)"):
        trainer(folder, seed=1, max_epochs=2).fit(Boring(), loader(), ckpt_path="last")


def test_the_best_checkpoint_is_tested(folder: Path) -> None:
    best = ModelCheckpoint(folder / "checkpoints", monitor="val_loss", filename="best")
    one = trainer(folder, callbacks=[best], max_epochs=2)
    one.fit(Boring(), loader(), loader(32))
    test_data = loader(32)
    one.test(dataloaders=test_data, ckpt_path="best", verbose=False)
    moved = folder.rename(folder.with_name("moved"))
    later = trainer(moved, callbacks=[ModelCheckpoint(monitor="val_loss", filename="best")])  # as another script has it
    later.test(Boring(), test_data, ckpt_path="best", verbose=False)
    assert torch.equal(later.final_metrics["test_loss"], one.final_metrics["test_loss"])


def test_equal_bits_need_one_way_to_evaluate_transformers(folder: Path) -> None:
    """FSDP's hooks keep torch from its fast path, whose last bits are others for some lengths of sequences."""
    torch.backends.mha.set_fastpath_enabled(True)
    ways = list[bool]()

    class Watching(Boring):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            ways.append(torch.backends.mha.get_fastpath_enabled())

    trainer(folder, bit_exact=True).fit(Watching(), loader(), loader(32))
    assert set(ways) == {False}
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_best_checkpoint_that_no_run_has_kept(folder: Path) -> None:
    best = ModelCheckpoint(monitor="val_loss")
    with pytest.raises(UserError, match=f"no ModelCheckpoint has kept a best checkpoint in {folder}: fit with one"):
        trainer(folder, callbacks=[best]).test(Boring(), loader(32), ckpt_path="best")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed=-1 is not a seed"),
        ({"virtual_ranks": 0}, "virtual_ranks=0: give an integer"),
        ({"bit_exact": "yes"}, "bit_exact=yes: give true or false"),
        ({"strategy": "ddpp"}, "strategy=ddpp: did you mean ddp"),
        ({"fast_dev_run": True}, r"Trainer\(fast_dev_run=True\) has no meaning here: set max_epochs, limit_train"),
        ({"overfit_batches": 3}, r"Trainer\(overfit_batches=3\) has no meaning here: train on a Subset"),
        ({"barebones": True}, r"Trainer\(barebones=True\) has no meaning here"),
        ({"callbacks": BatchSizeFinder()}, "BatchSizeFinder would choose the experiment"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0: give a number of micro-batches"),
    ],
)
def test_refusals(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        trainer(folder, **options).fit(Boring(), loader())


def test_a_tuner_cannot_choose_the_batch_by_memory(folder: Path) -> None:
    class Data(BoringDataModule):
        batch_size = 8

    with pytest.raises(UserError, match="BatchSizeFinder would choose the experiment"):
        Tuner(trainer(folder)).scale_batch_size(Boring(), datamodule=Data())


def test_arguments_are_those_of_lightning_and_its_own() -> None:
    import inspect

    own, lightnings = (inspect.signature(kind).parameters for kind in (onecurve.Trainer, L.Trainer))
    assert {"virtual_ranks", "bit_exact", "seed", "timeout"} <= own.keys() - lightnings.keys()
    assert not lightnings.keys() - own.keys()


def test_the_trainer_seeds_the_weights(folder: Path) -> None:
    def first_weight(seed: int) -> torch.Tensor:
        trainer(folder, seed=seed)
        return BoringModel().layer.weight

    assert torch.equal(first_weight(3), first_weight(3))
    assert not torch.equal(first_weight(3), first_weight(4))


def test_bit_exact_lets_cudnn_choose_no_kernel_by_its_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    trainer(folder, benchmark=True)
    assert torch.backends.cudnn.benchmark
    trainer(folder, benchmark=True, bit_exact=True)
    assert not torch.backends.cudnn.benchmark


def test_kinds_of_errors(folder: Path) -> None:
    class Diverges(Boring):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(self(batch)) * float("nan")
            self.log_dict({"val_loss": loss, "loss/train": loss})
            return loss

    with pytest.raises(
        onecurve.DivergedUserError, match="the training loss is not finite at step 1: training diverged"
    ):
        trainer(folder).fit(Diverges(), loader())
    (folder / "weights.ckpt").write_text("no checkpoint")
    with pytest.raises(onecurve.CheckpointUserError, match="is not a complete checkpoint"):
        trainer(folder.with_name("other")).fit(Boring(), loader(), ckpt_path=folder / "weights.ckpt")


class Weighted(onecurve.Module):
    """Weights its loss, which it does not log."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(32, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch.image).sum(1) * batch.weight).sum() * float("nan")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_weighted_loss_that_is_not_logged_stops_a_run_that_has_diverged(folder: Path) -> None:
    samples = DataLoader(TensorDataset(torch.ones(64, 32), torch.ones(64)), batch_size=8)
    with pytest.raises(onecurve.DivergedUserError, match="train/loss is nan at step 1"):
        trainer(folder).fit(Weighted(), samples)


class OnRankZero(Weighted):
    """Logs its loss on one rank only."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch.image).sum(1) * batch.weight).sum()
        if self.trainer.is_global_zero:
            self.log("train/loss", loss, rank_zero_only=True)
        return loss


def fit_with_a_loss_on_rank_zero(folder: Path) -> int:
    one = trainer(folder, strategy="ddp", devices=2, log_every_n_steps=1)
    one.fit(OnRankZero(), DataLoader(TensorDataset(torch.ones(32, 32), torch.ones(32)), batch_size=8))
    return one.global_step


def test_ranks_of_which_one_logs_the_loss_check_it_together(pool: Pool, folder: Path) -> None:
    assert pool.run(2, fit_with_a_loss_on_rank_zero, folder) == [4, 4]


class Interrupted(L.Callback):
    """Sends this process a signal before its fourth step."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_notebook_goes_on_after_an_interrupt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), mock.patch.object(CSVLogger, "after_save_checkpoint") as after_save:
        trainer(folder, callbacks=[Interrupted()]).fit(Boring(), loader())
    after_save.assert_called_once()  # a logger syncs its rows, or uploads the file
    assert signal.getsignal(signal.SIGINT) == handler
    again = trainer(folder)
    again.fit(Boring(), loader(), ckpt_path="last")
    assert again.global_step == 8


@pytest.mark.parametrize("folders", [["elsewhere"], ["elsewhere", "checkpoints", "checkpoints"]], ids=len)
def test_a_signal_saves_once_in_the_run_folder(
    folders: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a run looks for its last checkpoint, whatever folders its callbacks have."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    savers = [LastCheckpoint(str(folder / name)) for name in folders]
    with pytest.raises(KeyboardInterrupt):
        trainer(folder, callbacks=[Interrupted(), *savers]).fit(Boring(), loader())
    assert [file.name for file in (folder / "checkpoints").iterdir()] == ["last.ckpt"]


class InterruptedValidation(L.Callback):
    """Sends this process a signal in its first batch."""

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_a_validation_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    one = trainer(folder, callbacks=[InterruptedValidation()])
    folder.mkdir()
    append_event(folder, "start", 0)  # by another process, which trains there
    with pytest.raises(KeyboardInterrupt):
        one.validate(Boring(), loader(512))
    assert one.validate_loop.batch_progress.total.ready < 64
    assert [event["event"] for event in read_events(folder)] == ["start"]


def test_a_trainer_that_fits_again_compares_the_buffers_of_this_fit(folder: Path) -> None:
    class Counts(Boring):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.register_buffer(name, torch.zeros(()))

        def on_train_batch_end(self, *_: Any) -> None:
            for buffer in self.buffers():
                buffer += 1

    one = trainer(folder, accumulate_grad_batches=2, enable_checkpointing=False)
    one.fit(Counts("before"), loader())
    one.fit_loop.max_epochs = 2
    one.fit(Counts("after"), loader())
    assert one.global_step == 16


def test_last_begins_anew_where_nothing_was_saved(folder: Path) -> None:
    class Dies(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("dies")

    with pytest.raises(RuntimeError, match="dies"):
        trainer(folder, callbacks=Dies()).fit(Boring(), loader(), ckpt_path="last")
    again = trainer(folder)
    again.fit(Boring(), loader(), ckpt_path="last")
    assert (folder / "metrics.csv").read_text().count("\n") == 1 + again.global_step
    with pytest.raises(onecurve.CheckpointUserError, match=r"test\(ckpt_path='last'\): .* has no checkpoint"):
        trainer(folder.with_name("empty")).test(Boring(), loader(), ckpt_path="last")


def test_an_own_checkpoint_callback_leaves_the_last_one(folder: Path) -> None:
    best = ModelCheckpoint(monitor="val_loss", filename="best")
    one = trainer(folder, callbacks=[best], max_epochs=2)
    one.fit(Boring(), loader(), loader(32))
    assert {"last.ckpt", "best.ckpt"} <= {file.name for file in (folder / "checkpoints").iterdir()}
    tested, loaded = [], one.strategy.load_checkpoint
    one.strategy.load_checkpoint = lambda path, *a, **k: tested.append(path) or loaded(path, *a, **k)  # type: ignore
    one.test(dataloaders=loader(32), verbose=False)  # as Lightning: without a module, the best checkpoint
    assert Path(tested[0]).name == "best.ckpt"


class RandomSubsets(BoringDataModule):
    """Evaluates samples that it draws whenever a loader is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = dict[str, list[int]]()  # the last ones, by stage

    def _loader(self, name: str) -> DataLoader[Any]:
        self.drawn[name] = torch.randperm(64)[:16].tolist()
        return DataLoader(Subset(self.random_full, self.drawn[name]), batch_size=8)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test")


@pytest.mark.parametrize("every", [0, 1])
def test_an_evaluation_draws_the_same_samples_after_a_fit_as_in_another_process(every: int, folder: Path) -> None:
    one, data = trainer(folder, max_epochs=3, reload_dataloaders_every_n_epochs=every), RandomSubsets()
    one.fit(Boring(), datamodule=data)
    fitted = data.drawn["val"]
    one.validate(datamodule=data, verbose=False)
    one.test(datamodule=data, verbose=False)
    assert (data.drawn["val"] == fitted) == (every == 0)
    other = RandomSubsets()
    again = trainer(folder)
    again.validate(Boring(), datamodule=other, verbose=False)
    again.test(Boring(), datamodule=other, verbose=False)
    assert other.drawn == data.drawn


def test_loaders_that_are_not_given_are_those_of_the_module(folder: Path) -> None:
    class WithLoaders(Boring):
        def val_dataloader(self) -> Any:
            return loader(16)

        def test_dataloader(self) -> Any:
            return loader(16)

    one = trainer(folder)
    one.fit(WithLoaders(), loader())
    one.test(verbose=False)
    assert {"val_loss", "test_loss"} <= one.final_metrics.keys()
    with pytest.raises(UserError, match=r"fit\(\) has both loaders and a DataModule: give one of them"):
        trainer(folder.with_name("both")).fit(Boring(), loader(), datamodule=BoringDataModule())
    with pytest.raises(UserError, match=r"fit\(\) has both loaders and a DataModule: give one of them"):
        trainer(folder.with_name("both")).fit(Boring(), BoringDataModule(), loader())


class OfAnotherPackage:
    """Has the methods of a LightningDataModule, as one of pytorch_lightning, but is none of `lightning`."""

    def __init__(self) -> None:
        self._data = BoringDataModule()

    def __getattr__(self, name: str) -> Any:
        if name == "_data":  # not yet unpickled
            raise AttributeError(name)
        return getattr(self._data, name)


def test_a_datamodule_of_another_package_is_not_passed_over(folder: Path) -> None:
    """The module has loaders as well, which would be taken in silence."""
    one, data = trainer(folder), OfAnotherPackage()
    one.fit(Boring(), datamodule=data)  # type: ignore[arg-type]
    assert one.datamodule.plain is data


def test_evaluations_keep_their_data_apart(folder: Path) -> None:
    one = trainer(folder)
    one.validate(Boring(), loader(16), None, False)  # before the first fit, with Lightning's positions
    one.fit(Boring(), datamodule=BoringDataModule())
    one.test(None, loader(16), verbose=False)
    one.validate(verbose=False)
    assert len(one.predict(Boring(), None, BoringDataModule())) > 0


def test_what_is_saved_after_a_test_goes_on(folder: Path) -> None:
    """The test has data of its own, and the position is that in the data of the fit."""
    one, module = trainer(folder), Boring()
    vars(module)["train_dataloader"] = partial(L.LightningModule.train_dataloader, module)  # it has none
    one.fit(module, loader())
    one.test(None, loader(16), verbose=False)
    one.save_checkpoint(folder / "saved.ckpt")
    other = trainer(folder / "longer", max_epochs=2)
    other.fit(Boring(), loader(), ckpt_path=folder / "saved.ckpt")
    assert other.global_step == 16


class ReadsLoaders(Boring):
    """Tells the function that collates the epoch, and reads the names of the validations."""

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.collate_fn.epoch = self.current_epoch

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        names = list(self.trainer.val_dataloaders)  # type: ignore[arg-type]
        self.log(f"val_{names[dataloader_idx]}", batch.sum(), add_dataloader_idx=False)


class CollatesByEpoch:
    epoch = -1

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        assert self.epoch >= 0
        return torch.stack(samples)


def test_a_module_reads_the_loaders_of_the_trainer(folder: Path) -> None:
    one, collate = trainer(folder, max_epochs=2, num_sanity_val_steps=0), CollatesByEpoch()
    training = DataLoader(RandomDataset(32, 64), batch_size=8, collate_fn=collate)
    one.fit(ReadsLoaders(), training, {"near": loader(16), "far": loader(16)})
    assert {"val_near", "val_far"} < one.final_metrics.keys()
    assert collate.epoch == 1
    one.validate(None, [loader(16)], verbose=False)
    assert len(one.val_dataloaders) == 1


@pytest.mark.parametrize(("lr", "changed"), [({"lr": 1}, {"lr": 5}), (np.float64(0.1), np.float64(0.5))])
def test_hyper_parameters_are_compared(lr: Any, changed: Any, folder: Path) -> None:
    class Hyper(Boring):
        def __init__(self, options: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    trainer(folder).fit(Hyper(lr), loader())
    with pytest.raises(UserError, match=r"had module\.options"):
        trainer(folder, max_epochs=2).fit(Hyper(changed), loader(), ckpt_path="last")


class OfHydra(Boring):
    """Keeps what Hydra gives to a module: an optimizer that lacks weights, a list of its own kind, and a network."""

    def __init__(self, optimizer: Any, widths: Any, net: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)

    def configure_optimizers(self) -> Any:
        return self.hparams["optimizer"](self.parameters())


class DataOfHydra(BoringDataModule):
    def __init__(self, lengths: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyper_parameters_of_hydra(folder: Path) -> None:
    """They are compared and saved, so that a run goes on and its best checkpoint can be tested."""

    def fit(epochs: int, lr: float = 0.1, lengths: tuple[int, ...] = (3, 1)) -> onecurve.Trainer:
        one = trainer(folder, max_epochs=epochs)
        config = OmegaConf.create({"widths": [2, {"last": 4}], "lengths": list(lengths), "optimizer": {"lr": lr}})
        optimizer = partial(torch.optim.SGD, **config.optimizer)
        module = OfHydra(optimizer, config.widths, torch.nn.Linear(1, 1))
        one.fit(module, datamodule=DataOfHydra(config.lengths), ckpt_path="last")
        return one

    fit(1)
    fit(2).test(ckpt_path="last", verbose=False)
    last = folder / "checkpoints" / "last.ckpt"
    assert OfHydra.load_from_checkpoint(last, optimizer=None).hparams["widths"] == [2, {"last": 4}]
    assert DataOfHydra.load_from_checkpoint(last).hparams["lengths"] == [3, 1]
    with pytest.raises(UserError, match=r"had module\.optimizer\.lr=0\.1 \(now 0\.2\)"):
        fit(3, lr=0.2)
    with pytest.raises(UserError, match=r"had data\.lengths=\[3, 1\] \(now \[2, 2\]\)"):
        fit(3, lengths=(2, 2))


def test_an_optimizer_of_a_spawned_script_has_the_same_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for epochs, name in enumerate(("__main__", "__mp_main__"), 1):
        own = type("Own", (torch.optim.SGD,), {"__module__": name})
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Own=own))  # or Lightning would not keep it
        trainer(folder, max_epochs=epochs).fit(OfHydra(partial(own, lr=0.1), []), loader(), ckpt_path="last")


def test_hyper_parameters_that_hydra_cannot_resolve(folder: Path) -> None:
    """Such as `${hydra:runtime.cwd}` in a process that Hydra has not started."""
    config = OmegaConf.create({"widths": ["${nowhere}"]})
    trainer(folder).fit(OfHydra(partial(torch.optim.SGD, lr=0.1), config.widths), loader())
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt")
    assert checkpoint["hyper_parameters"] == {"widths": ["${nowhere}"], "net": None}


class Noting(DummyLogger):
    """Keeps what it logs as hyper-parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.params: dict[str, Any] = {}

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.params |= params


def test_a_script_logs_hyper_parameters_before_the_run(folder: Path) -> None:
    noting = Noting()
    one = trainer(folder, logger=[noting])
    assert one.logger is noting
    for logger in one.loggers:
        logger.log_hyperparams({"of the script": 1})
    one.fit(Boring(), loader())
    assert noting.params["of the script"] == 1
    assert noting.params["seed"] == 0
    assert [type(logger).__name__ for logger in one.loggers] == ["Noting", "CSVLogger"]


def test_a_script_removes_a_logger_before_the_run(folder: Path) -> None:
    """The others come back after a stage that fails before they start, or starts them in another process."""

    class Fails(Boring):
        def configure_optimizers(self) -> Any:
            raise KeyError("rate")

    kept, removed = Noting(), Noting()
    one = trainer(folder, logger=[kept, removed])
    one.loggers = [logger for logger in one.loggers if logger is not removed]
    with pytest.raises(KeyError, match="rate"):
        one.fit(Fails(), loader())
    assert one.logger is kept
    one.fit(Boring(), loader())
    assert kept.params
    assert not removed.params


def test_the_same_trainer_describes_each_fit(folder: Path) -> None:
    one = trainer(folder)
    one.fit(Boring(), loader())
    one.fit_loop.max_epochs = 2
    with pytest.raises(UserError, match="had training data="):
        one.fit(Boring(), loader(72), ckpt_path="last")


def test_callbacks_of_a_module_are_checked(folder: Path) -> None:
    class Accumulates(Boring):
        def configure_callbacks(self) -> Any:
            return [GradientAccumulationScheduler({0: 4})]

    with pytest.raises(UserError, match="GradientAccumulationScheduler changes the number of micro-batches"):
        trainer(folder).fit(Accumulates(), loader())


def fit_with_other_weights(folder: Path) -> None:
    torch.manual_seed(int(os.environ["RANK"]))
    module, logger = Boring(), logging.getLogger("onecurve")
    try:
        trainer(folder, strategy="fsdp", devices=2).fit(module, loader())
    finally:  # the ranks of the pool last longer than a script
        logger.handlers, logger.propagate, logger.level = [], True, logging.NOTSET


def test_ranks_begin_with_the_same_weights(pool: Pool, folder: Path) -> None:
    with pytest.raises(RankFailed, match=r"the ranks begin with different weights: .*, or call lightning.seed_ev"):
        pool.run(2, fit_with_other_weights, folder)


def fit_with_other_samples(folder: Path) -> None:
    torch.manual_seed(int(os.environ["RANK"]))
    data, _ = random_split(RandomDataset(32, 80), [64, 16])
    logger = logging.getLogger("onecurve")
    try:
        one = trainer(folder, strategy="ddp", devices=2)
        one.fit(Boring(), DataLoader(data, batch_size=8))
    finally:  # the ranks of the pool last longer than a script
        logger.handlers, logger.propagate, logger.level = [], True, logging.NOTSET


def test_ranks_train_the_same_samples(pool: Pool, folder: Path) -> None:
    with pytest.raises(RankFailed, match="the ranks have different training data: split or shuffle it after"):
        pool.run(2, fit_with_other_samples, folder)


def fit_with_shards(folder: Path, sharded: str) -> list[Any]:
    """Divide the samples of training or validation by rank in the script; return the warnings of the loaders."""
    rows: Any = torch.linspace(0, 1, 64)[:, None].repeat(1, 32)
    own = rows[int(os.environ["RANK"]) :: 2]
    train, val = (DataLoader(own if name == sharded else rows, batch_size=8) for name in ("train", "val"))
    with mock.patch.object(rank_loader, "_log") as log:
        trainer(folder, strategy="ddp", devices=2).fit(Boring(), train, val)
    return [call.args[0] % call.args[1:] for call in log.warning.call_args_list]


@pytest.mark.parametrize("sharded", ["train", "val", "none"])
def test_warns_of_samples_that_differ_between_the_ranks(sharded: str, pool: Pool, folder: Path) -> None:
    expected = [f"GivenLoaders.{sharded}_dataloader: the ranks have different samples"] * (sharded != "none")
    for warnings in pool.run(2, fit_with_shards, folder, sharded):
        assert [text.partition(",")[0] for text in warnings] == expected


@pytest.mark.parametrize("samples", [8, 0])
def test_refuses_numbers_of_samples_that_differ_between_the_ranks(samples: int, pool: Pool, folder: Path) -> None:
    expected = f"GivenLoaders.val_dataloader: the ranks have 16, {samples} samples, so some would wait for others"
    with pytest.raises(RankFailed, match=expected):
        pool.run(2, fit_with_fewer_samples, folder, samples)


def fit_with_fewer_samples(folder: Path, samples: int) -> None:
    val = DataLoader(RandomDataset(32, [16, samples][int(os.environ["RANK"])]), batch_size=4)
    trainer(folder, strategy="ddp", devices=2).fit(Boring(), loader(), val)


class CountsSteps(Boring):
    """Asks for the number of steps, for which Lightning asks for the loaders."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1 / self.trainer.estimated_stepping_batches)
        self.rate = optimizer.param_groups[0]["lr"]
        return optimizer


def fit_with_new_loaders(folder: Path, strategy: str) -> float:
    options: Any = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    module = CountsSteps()
    trainer(folder, strategy=strategy, devices=2, **options).fit(module, loader())
    return module.rate


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_compare_their_samples_while_the_optimizer_is_configured(strategy: str, pool: Pool, folder: Path) -> None:
    """It sees one process, and loaders that are made anew then have samples that all ranks share and compare."""
    assert pool.run(2, fit_with_new_loaders, folder, strategy) == [0.1 / (2 * len(loader()))] * 2


class CountsRows(Boring):
    def on_validation_start(self) -> None:
        self.rows = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.rows += len(batch)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_evaluation_leaves_out_what_the_loader_drops(is_stream: bool, folder: Path) -> None:
    """Lightning predicts it, but for that of a stream."""
    data = RandomIterableDataset(32, 13) if is_stream else RandomDataset(32, 13)
    loader = DataLoader(data, batch_size=8, drop_last=True)
    for one in (L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False), trainer(folder)):
        module = CountsRows()
        one.validate(module, loader)
        assert module.rows == 8
        assert sum(map(len, one.predict(module, loader) or [])) == (8 if is_stream else 13)


class WorldOfSetup(Boring):
    """Reads the number of processes, and of steps, in its `setup`."""

    def setup(self, stage: str) -> None:
        self.seen = (self.trainer.world_size, self.trainer.estimated_stepping_batches)


class WithOwnLoader(WorldOfSetup):
    def setup(self, stage: str) -> None:
        self.data = RandomDataset(32, 64)
        super().setup(stage)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=8)


@pytest.mark.parametrize("has_own", [True, False])
def test_setup_sees_the_experiment(has_own: bool, folder: Path) -> None:
    """Lightning sets the loaders of a module up before its callbacks."""
    one = trainer(folder, bit_exact=True, max_epochs=2)
    module = WithOwnLoader() if has_own else WorldOfSetup()
    one.fit(module, None if has_own else loader())
    assert module.seen == (4, 16)


class NumPyNumbers(Boring):
    """Has numbers of NumPy where a checkpoint keeps them."""

    def __init__(self, temperature: Any = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01 * np.sqrt(2))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["table"] = np.arange(3)


def test_numbers_of_numpy_are_saved(folder: Path) -> None:
    trainer(folder).fit(NumPyNumbers(np.sqrt(32)), loader())
    trainer(folder, max_epochs=2).fit(NumPyNumbers(np.sqrt(32)), loader(), ckpt_path="last")
    last = folder / "checkpoints" / "last.ckpt"
    assert NumPyNumbers.load_from_checkpoint(last).hparams["temperature"] == np.sqrt(32)
    assert torch.load(last)["table"].tolist() == [0, 1, 2]


class Place:
    """An object that a module keeps in checkpoints."""


def test_names_an_object_that_no_run_could_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Saves(Boring):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["place"] = Place()

    trainer(folder).fit(Saves(), loader())
    assert f"no run can go on from these checkpoints: each contains {__name__}.Place" in caplog.text
    with pytest.raises(onecurve.CheckpointUserError, match=r"Place: let on_save_checkpoint .*, name the class to"):
        trainer(folder, max_epochs=2).fit(Saves(), loader(), ckpt_path="last")
    with torch.serialization.safe_globals([Place]):
        trainer(folder, max_epochs=2).fit(Saves(), loader(), ckpt_path="last")


@pytest.mark.parametrize("kept", [lambda x: x, threading.Lock()], ids=["function", "lock"])
def test_names_what_cannot_be_sent_to_spawned_processes(kept: Any, folder: Path) -> None:
    module = Boring()
    module.kept = kept
    with pytest.raises(
        UserError, match=r"ddp_spawn pickles trainer, module and data \(.*pickle.*\): use strategy=ddp$"
    ):
        trainer(folder, strategy="ddp_spawn", devices=2).fit(module, loader())


def test_a_hook_may_replace_an_optimizer_of_sharded_weights(folder: Path) -> None:
    class Replaces(Boring):
        def on_train_start(self) -> None:
            self.trainer.optimizers = [torch.optim.Adam(self.parameters())]

    trainer(folder, strategy="fsdp").fit(Replaces(), loader())
    (saved,) = torch.load(folder / "checkpoints" / "last.ckpt")["optimizer_states"]
    assert saved["param_groups"][0]["param_names"] == ["layer.weight", "layer.bias"]


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_objects_are_read_if_the_user_says_so(strategy: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Keeps(Boring):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["place"] = Place()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.place = checkpoint["place"]

    trainer(folder, strategy=strategy).fit(Keeps(), loader())
    fitted, tested = Keeps(), Keeps()
    trainer(folder, max_epochs=2, strategy=strategy).fit(fitted, loader(), ckpt_path="last", weights_only=False)
    trainer(folder).test(tested, loader(), ckpt_path=folder / "checkpoints" / "last.ckpt", weights_only=False)
    assert isinstance(fitted.place, Place)
    assert isinstance(tested.place, Place)
    assert "looking for the one before" not in capfd.readouterr().err


def test_draws_at_the_start_of_an_epoch_are_those_of_the_epoch(folder: Path) -> None:
    class Draws(Boring):
        drawn: float

        def on_train_epoch_start(self) -> None:
            self.drawn = float(torch.rand(())) + float(np.random.rand())

    module, resumed = Draws(), Draws()
    trainer(folder / "whole", max_epochs=2).fit(module, loader())
    trainer(folder / "two").fit(Draws(), loader())
    trainer(folder / "two", max_epochs=2).fit(resumed, loader(), ckpt_path="last")
    assert module.drawn == resumed.drawn


def test_a_metric_of_micro_batches_keeps_its_precision(folder: Path) -> None:
    class Measures(Boring):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()
            self.types = set[torch.dtype]()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(self(batch))
            self.types.add(self.metric.dtype)
            self.metric(loss)
            self.log("metric", self.metric, on_step=True, on_epoch=True)
            return loss

    module = Measures()
    trainer(folder, accumulate_grad_batches=2, precision="64-true").fit(module, loader())
    assert module.types == {torch.float64}


class AveragesBeforeReset(Boring):
    """Lets a target follow the weights in a hook between the forward and the backward pass, as in BYOL, and counts."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.target = torch.nn.Linear(32, 2).requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            target = self.target(batch)
        return torch.nn.functional.mse_loss(self(batch), target)

    def on_before_zero_grad(self, *_: Any) -> None:
        self.count += 1
        with torch.no_grad():
            for weight, average in zip(self.layer.parameters(), self.target.parameters(), strict=True):
                average.mul_(0.9).add_(weight, alpha=0.1)


@pytest.mark.parametrize("parts", [{"accumulate_grad_batches": 2}, {"bit_exact": True}])
def test_a_hook_before_the_reset_sees_a_whole_step(parts: dict[str, Any], folder: Path) -> None:
    found = []
    for name, options in {"whole": {}, "parts": parts}.items():
        one = trainer(folder / name, max_epochs=2, precision="64-true", **options)
        module = AveragesBeforeReset()
        one.fit(module, loader())
        found.append(module.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-12)


class LineSearch(Boring):
    """Chooses the length of a step by the losses of several."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


def fit_line_search(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    one = trainer(folder, precision="64-true", limit_train_batches=3, **options)
    module = LineSearch()
    one.fit(module, loader())
    return {name: weight.clone() for name, weight in module.state_dict().items()}


def fit_line_search_on_ranks(folder: Path) -> dict[str, torch.Tensor]:
    return fit_line_search(folder, strategy="ddp", devices=2)


def test_ranks_search_along_a_line_together(pool: Pool, folder: Path) -> None:
    expected = fit_line_search(folder / "one")
    for weights in pool.run(2, fit_line_search_on_ranks, folder / "two"):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)


def test_a_continued_run_names_masks_that_no_checkpoint_has(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for epochs in (1, 2):
        pruning = ModelPruning("l1_unstructured", amount=0.3)
        trainer(folder, callbacks=[pruning], max_epochs=epochs).fit(Boring(), loader(), ckpt_path="last")
        assert ("ModelPruning saves no masks" in caplog.text) == (epochs == 2)


def fit_again_on_ranks(folder: Path) -> int:
    one = trainer(folder, strategy="ddp", devices=2)
    one.fit(Boring(), loader())
    one.test(Boring(), loader())
    one.fit_loop.max_epochs = 2
    one.fit(Boring(), loader(), ckpt_path="last")
    return one.global_step


def test_ranks_fit_again_after_a_test(pool: Pool, folder: Path) -> None:
    assert pool.run(2, fit_again_on_ranks, folder) == [16, 16]


def test_a_batch_sampler_without_a_batch_leaves_validation_out(folder: Path) -> None:
    one = trainer(folder)
    one.fit(Boring(), loader(), DataLoader(RandomDataset(32, 3), batch_sampler=BatchSampler(range(3), 4, True)))
    assert one.global_step == 8
    assert one.validate() == []


class OfSeveral(Boring):
    """Evaluates several loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("mean", batch.mean(), batch_size=len(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> int:
        return dataloader_idx


def evaluate_several(trainer: L.Trainer) -> tuple[list[dict[str, float]], list[int]]:
    """Return the values of loaders of which some are empty, and the indices that their batches get."""
    samples: Any = torch.arange(16.0)[:, None].expand(-1, 32)
    nothing: Any = []
    empty = [
        DataLoader[Any](nothing, batch_size=8),
        DataLoader[Any](samples, batch_sampler=BatchSampler(range(3), 4, True)),
    ]
    loaders = [empty[0], DataLoader(samples, batch_size=8), empty[1], DataLoader(samples + 1, batch_size=8)]
    values = trainer.validate(OfSeveral(), loaders, verbose=False)
    predictions: Any = trainer.predict(OfSeveral(), loaders[:2])
    return [dict(one) for one in values], [index for of_loader in predictions for index in of_loader]


def evaluate_several_on_ranks(folder: Path, bit_exact: bool) -> Any:
    return evaluate_several(trainer(folder, strategy="ddp", devices=2, bit_exact=bit_exact))


@pytest.mark.parametrize("bit_exact", [False, True])
def test_an_empty_loader_counts_as_in_lightning(bit_exact: bool, pool: Pool, folder: Path) -> None:
    """So a metric has one name whether or not the loaders before it have samples."""
    plain = evaluate_several(L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False))
    assert plain == ([{}, {"mean/dataloader_idx_1": 7.5}, {"mean/dataloader_idx_3": 8.5}], [1, 1])
    assert evaluate_several(trainer(folder, bit_exact=bit_exact)) == plain
    assert pool.run(2, evaluate_several_on_ranks, folder, bit_exact) == [plain] * 2


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluates_a_checkpoint_of_plain_lightning(stage: str, folder: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "max_steps": 1}
    plain, module = L.Trainer(**options, logger=False, default_root_dir=folder), BoringModel()
    data = DataLoader(RandomDataset(32, 8), batch_size=4)
    plain.fit(module, data)
    plain.save_checkpoint(folder / "plain.ckpt")
    expected = getattr(plain, stage)(module, data)
    own = onecurve.Trainer(**options, default_root_dir=folder / "own")
    found = getattr(own, stage)(BoringModel(), data, ckpt_path=folder / "plain.ckpt")
    torch.testing.assert_close(found, expected)
    with pytest.raises(UserError, match=r"plain.ckpt has no position in the data, .* starts a new run"):
        onecurve.Trainer(**options, default_root_dir=folder / "fit").fit(module, data, ckpt_path=folder / "plain.ckpt")


def test_the_seed_is_that_of_seed_everything(folder: Path) -> None:
    L.seed_everything(7, verbose=False)
    assert trainer(folder, seed=None).seed == 7


@pytest.mark.parametrize(
    ("is_early", "is_seeded", "is_named"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_names_a_module_that_was_built_before_the_trainer(
    is_early: bool,
    is_seeded: bool,
    is_named: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    data = loader()
    if is_seeded:
        monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    module = Boring()
    one = trainer(folder, seed=None)
    one.fit(module if is_early else Boring(), data)
    assert ("no random number was drawn since the trainer" in caplog.text) == is_named


def test_the_seed_of_one_trainer_is_not_that_of_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    trainer(folder, seed=7)
    assert trainer(folder, seed=None).seed == 0


def test_variables_do_not_set_what_lightning_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "")  # which Lightning does not read
    trainer(folder)
    monkeypatch.setenv("PL_TRAINER_ACCUMULATE_GRAD_BATCHES", "2")
    with pytest.raises(UserError, match=r"BATCHES=2 is no option .* give accumulate_grad_batches to the trainer$"):
        trainer(folder)


def test_a_script_is_told_what_the_run_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("onecurve")
    roots, logging.getLogger().handlers = logging.getLogger().handlers, []
    try:
        trainer(folder).fit(Boring(), loader(70))
    finally:
        logging.getLogger().handlers = roots
        logger.handlers, logger.propagate = [], True
    shown = capsys.readouterr().err
    assert "loaders of a script, 70 samples" in shown
    assert "each epoch leaves out 6 samples" in shown


class Split(Boring):
    """Has what a pipeline asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = None
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, outputs: Any, batch: Any = None) -> Any:
        return super().loss(outputs)


def evaluate_and_fit_twice(folder: Path) -> int:
    logger = logging.getLogger("onecurve")
    try:
        one = trainer(folder, strategy="pipeline", devices=2, bit_exact=True)
        module = Split()
        one.validate(module, loader(16), verbose=False)
        one.fit(module, loader())
        one.fit_loop.max_epochs = 2
        one.fit(module, loader(), ckpt_path="last")
    finally:
        logger.handlers, logger.propagate, logger.level = [], True, logging.NOTSET
    return one.global_step


def test_a_network_that_is_split_may_be_fitted_again(pool: Pool, folder: Path) -> None:
    """Its ranks have different weights then."""
    assert pool.run(2, evaluate_and_fit_twice, folder) == [16, 16]


def evaluate_with_another_trainer(strategy: str, later: str, folder: Path) -> None:
    logger = logging.getLogger("onecurve")
    try:
        module = Split()
        trainer(folder, strategy=strategy, devices=2).fit(module, loader())
        trainer(folder / "later", strategy=later, devices=2).validate(module, loader(16))
    finally:
        logger.handlers, logger.propagate, logger.level = [], True, logging.NOTSET


@pytest.mark.parametrize(
    ("strategy", "later"),
    [("pipeline", "pipeline"), ("fsdp", "ddp"), pytest.param("fsdp", "fsdp", marks=pytest.mark.slow)],
)
def test_a_network_that_another_trainer_has_divided(strategy: str, later: str, pool: Pool, folder: Path) -> None:
    with pytest.raises(RankFailed, match=r"UserError: Split has layers that another trainer has divided among"):
        pool.run(2, evaluate_with_another_trainer, strategy, later, folder)


class Fails(Split):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        raise ValueError("mine")


def evaluate_after_an_error(folder: Path) -> float:
    one = trainer(folder, strategy="pipeline", devices=2, bit_exact=True, num_sanity_val_steps=0)
    module = Fails()
    with pytest.raises(ValueError, match="mine"):
        one.fit(module, loader())
    return one.validate(module, loader(16), verbose=False)[0]["val_loss"]


def test_a_split_network_is_evaluated_after_an_error(pool: Pool, folder: Path) -> None:
    first, second = pool.run(2, evaluate_after_an_error, folder)
    assert first == second


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (onecurve.DDP(), {}),
        (onecurve.DDP(bucket_cap_mb=5, shares=[1, 2]), {}),
        (onecurve.DDP(comm_hook="fp16"), {"strategy.comm_hook": "fp16"}),
        (
            onecurve.DDP(comm_hook="powersgd", matrix_approximation_rank=2),
            {"strategy.comm_hook": "powersgd", "strategy.matrix_approximation_rank": 2},
        ),
        (onecurve.FSDP(param_dtype="bfloat16"), {"strategy.param_dtype": "bfloat16"}),
        (onecurve.Pipeline(stages=2, microbatches=8), {}),
        (DDPStrategy(process_group_backend="gloo"), {}),
    ],
)
def test_lossy_options_of_a_strategy_are_part_of_the_experiment(strategy: Any, options: dict[str, Any]) -> None:
    config = OmegaConf.create({"strategy": _describe_options(strategy)})
    assert experiment_options(config) == options
