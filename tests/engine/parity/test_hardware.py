"""No hardware option changes the curve: small runs with drawn settings against one process with the defaults.

`make test` has each choice in a run, and `make test-all` each pair of choices.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onecurve.identity.option_kinds import HARDWARE, experiment_options
from onecurve.parallel.ddp import DDP
from onecurve.parallel.fsdp import FSDP
from onecurve.parallel.pipeline.pipeline import Pipeline
from onecurve.parallel.sharded_state import ShardedStateStrategy
from src.data.augment.augmentation import Augmentation
from src.data.datamodule import ImageDataModule
from src.data.sources.array_file import ArrayFile
from src.data.sources.cifar import CIFAR10
from src.data.sources.class_folders import ClassFolders
from src.models.classifier import ImageClassifier
from tests.support.comparison import TOLERANCE, check_replicas, relative
from tests.support.experiments import SHORT_RUN
from tests.support.hardware import BATCH, VARIED, Setting, cover, overrides
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit_ranks

NOT_VARIED = {  # by why they cannot matter here, or where else they are tested
    "the program": "runtime.* run_dir ckpt_path resume trainer.default_root_dir trainer.plugins trainer.strategy "
    "trainer.callbacks trainer.logger trainer.use_distributed_sampler strategy.devices strategy.num_nodes "
    "strategy.single_process strategy.accelerator strategy.parallel_devices strategy.cluster_environment "
    "strategy.checkpoint_io strategy.precision_plugin trainer._target_ trainer.barebones trainer.model_registry "
    "trainer.timeout trainer.config launch.function strategy.process_group_backend strategy.start_method "
    "strategy.timeout",
    "what happens after training": "fit test predict data.predict_dir trainer.limit_predict_batches module.tta",
    "records": "report tags optimized_metric logger.* doctor plan hardware.* trainer.profiler.* "
    "trainer.enable_progress_bar trainer.enable_model_summary trainer.enable_autolog_hparams "
    "trainer.enable_checkpointing callbacks.best.* callbacks.progress_bar.* callbacks.timeline.* "
    "callbacks.throughput.* callbacks.gradients.* callbacks.evaluation.* callbacks.samples.* callbacks.pruning.trial "
    "callbacks.early_stopping.verbose",
    "tests/engine/launch, tests/engine/faults": "launch.timeout launch.max_restarts launch.elastic "
    "launch.min_devices launch.probe trainer.num_nodes trainer.max_time.*",
    "tests/template/data": "data.root data.source.urls data.source.file data.source.in_memory",
    "DataModules of other projects": "data.data_dir data.pin_memory data.persistent_workers data.prefetch_factor",
    "GPUs, or a compiler": "trainer.accelerator trainer.benchmark module.compile optimizer.compile "
    "data.augment.compile optimizer.fused optimizer.foreach optimizer.capturable",
}
QUICK, PAIRS = cover(1, seed=125), cover(2)  # this seed needs few settings, and few processes


def test_every_hardware_option_is_varied_or_excused() -> None:
    excused = {name for names in NOT_VARIED.values() for name in names.split()}
    named = {name.removesuffix(".*").removesuffix(".every_n_train_steps") for name in VARIED}
    classes: dict[str, list[Any]] = {
        "data": [ImageDataModule],
        "data.augment": [Augmentation],
        "data.source": [CIFAR10, ArrayFile, ClassFolders],
        "module": [ImageClassifier],
        "strategy": [DDP, FSDP, Pipeline, ShardedStateStrategy],
    }
    declared = {
        f"{node}.{option}" for node, kinds in classes.items() for kind in kinds for option in kind.hardware_options
    }
    assert {name for name in {*HARDWARE, *declared} if name.removesuffix(".*") not in named} == excused


@pytest.mark.parametrize(
    "setting",
    [*QUICK, *(pytest.param(setting, marks=pytest.mark.slow) for setting in PAIRS)],
    ids=lambda setting: f"{setting['strategy']} x{setting['trainer.devices']}",
)
def test_curve_is_that_of_the_defaults(
    setting: Setting, alone: Callable[..., Record], pool: Pool, small: list[str], folder: Path
) -> None:
    cfg = compose(folder, *small, *SHORT_RUN, *overrides(setting))
    records, reference = fit_ranks(cfg, pool), alone()
    every = setting["trainer.log_every_n_steps"]
    expected = reference.losses[every - 1 :: every]
    assert {name for record in records for name in record.final} == set(reference.final)
    for record in records:
        assert record.losses == pytest.approx(expected, rel=TOLERANCE)
        assert max(relative(tensor, reference.final[name]) for name, tensor in record.final.items()) < TOLERANCE
    check_replicas(records)
    default = experiment_options(compose(folder, *small, *SHORT_RUN))
    assert experiment_options(cfg) | {"data.batch_size": BATCH} == default | {"data.batch_size": BATCH}
