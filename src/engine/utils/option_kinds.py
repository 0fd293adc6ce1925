"""The two kinds of options: the experiment is what a run computes, and the hardware is how it computes that.

Two runs with the same options of the experiment have one curve, whatever their hardware. A name counts before a
pattern, so that `optimizer.compile` is hardware although `optimizer.*` is the experiment. `NODE.*` also stands for the
node itself. An option that is hardware only together with others is declared as experiment. An option of a user's own
class without a declaration here counts as experiment, but one of a strategy as hardware.
tests/engine/config/test_option_kinds.py checks that each option of the project has one kind.
"""

from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf

from src.engine.utils.overrides import flatten_config
from src.engine.utils.targets import default_options

EXPERIMENT = """
    seed init_from model.* optimizer.* scheduler.*
    module._target_ module.net.* module.optimizer.* module.schedule.* module.generator.* module.discriminator.*
    module.latent module.reference_batch_size module.lr_scaling module.label_smoothing
    data._target_ data.source.* data.num_classes data.image_shape data.mean data.std data.augment.* data.seed
    data.batch_size data.norm_groups data.val_fraction data.train_samples data.length data.train_size
    module.length module.width module.depth module.dropout module.lr
    trainer.precision trainer.sync_batchnorm trainer.gradient_clip_val trainer.gradient_clip_algorithm
    trainer.max_epochs trainer.min_epochs trainer.max_steps trainer.min_steps trainer.fast_dev_run
    trainer.overfit_batches trainer.limit_train_batches trainer.limit_val_batches trainer.limit_test_batches
    trainer.check_val_every_n_epoch trainer.val_check_interval
    strategy.comm_hook strategy.comm_start_step strategy.matrix_approximation_rank strategy.model_averaging_period
    strategy.param_dtype strategy.reduce_dtype strategy._target_=src.engine.parallel.dp.DP
    callbacks.ema.* callbacks.whitening.* callbacks.early_stopping.* callbacks.pruning.*
""".split()  # NAME=VALUE is a value of a hardware option that makes another experiment

HARDWARE = """
    ckpt_path resume fit test predict doctor report tags optimized_metric run_dir runtime.* logger.*
    launch.timeout launch.max_restarts
    optimizer.compile optimizer.fused optimizer.foreach optimizer.capturable data.augment.compile
    module.compile module.channels_last module.recompute module.tta
    data.root data.source.urls data.source.file data.source.in_memory data.predict_dir
    data.batch_size_per_device data.num_workers data.device_resident
    trainer._target_ trainer.accelerator trainer.devices trainer.num_nodes trainer.accumulate_grad_batches
    trainer.max_time trainer.log_every_n_steps trainer.num_sanity_val_steps trainer.limit_predict_batches
    trainer.enable_progress_bar trainer.enable_model_summary trainer.enable_checkpointing
    trainer.enable_autolog_hparams trainer.deterministic trainer.benchmark trainer.inference_mode
    trainer.detect_anomaly trainer.barebones trainer.profiler.* trainer.reload_dataloaders_every_n_epochs
    trainer.use_distributed_sampler trainer.strategy trainer.logger trainer.callbacks trainer.plugins
    trainer.default_root_dir trainer.model_registry
    strategy._target_ strategy.devices strategy.num_nodes strategy.single_process strategy.shares
    strategy.shard_optimizer strategy.bucket_cap_mb strategy.gradient_as_bucket_view
    strategy.replicas strategy.reshard_after_forward strategy.sharded_checkpoints strategy.stages strategy.schedule
    strategy.microbatches strategy.split strategy.data_parallel strategy.accelerator strategy.parallel_devices
    strategy.cluster_environment strategy.checkpoint_io strategy.precision_plugin
    callbacks.best.* callbacks.checkpoint.* callbacks.progress_bar.* callbacks.timeline.* callbacks.throughput.*
    callbacks.gradients.* callbacks.evaluation.* callbacks.frechet.* callbacks.samples.* callbacks.pruning.trial
""".split()

# The same of many a user's own DataModule.
OWN_HARDWARE = ["data.data_dir", "data.pin_memory", "data.persistent_workers", "data.prefetch_factor"]

# A continued run may change these: longer training, hyper-parameters, callbacks, and what it evaluates.
CONTINUABLE = """
    trainer.max_epochs trainer.min_epochs trainer.max_steps trainer.min_steps trainer.fast_dev_run optimizer.*
    scheduler.* callbacks.* trainer.limit_val_batches trainer.limit_test_batches trainer.check_val_every_n_epoch
    trainer.val_check_interval
""".split()

_PARTS = ("model.", "optimizer.", "scheduler.")  # they count where the module refers to them
_COPIES = {  # nodes of conf/ that interpolate another one, under whose name they count
    "module.net.": "model.",
    "module.optimizer.": "optimizer.",
    "module.schedule.": "scheduler.",
    "data.seed": "seed",
}


def matches(name: str, patterns: list[str]) -> bool:
    """Return whether a pattern matches the dotted name of an option or node."""
    return any(fnmatchcase(name, pattern) or name == pattern.removesuffix(".*") for pattern in patterns)


def kinds(name: str) -> list[str]:
    """Return the kinds of an option, `experiment` or `hardware`: one, or none if it has no declaration."""
    declared = {"experiment": EXPERIMENT, "hardware": HARDWARE + OWN_HARDWARE}
    exact = [kind for kind, patterns in declared.items() if name in patterns]
    return exact or [kind for kind, patterns in declared.items() if matches(name, patterns)]


def is_experiment(name: str, value: Any) -> bool:
    """Return whether an option with that value belongs to the experiment."""
    if f"{name}={value}" in EXPERIMENT:
        return True
    return kinds(name) != ["hardware"] if kinds(name) else not name.startswith("strategy.")


def experiment_options(config: DictConfig) -> dict[str, Any]:
    """Return the options of the experiment of a resolved configuration, by dotted name.

    An option at the default of its class counts as absent, since the class of another strategy may not have it.
    """
    flat = flatten_config(OmegaConf.to_container(config))
    options = {}
    for name, value in flat.items():
        is_counted = is_experiment(name, value) and not name.startswith(_PARTS)
        if is_counted and value != default_value(config, name):
            source = _source(name)
            options[source if source in flat and flat[source] == value else name] = value
    return options


def default_value(config: DictConfig, name: str) -> Any:
    """Return the default of an option in the signature of its class, or None."""
    node, _, key = name.rpartition(".")
    target = OmegaConf.select(config, f"{node}._target_")
    return default_options(target).get(key) if target else None


def _source(name: str) -> str:
    """Return the name of the option that an option interpolates in conf/, or its own name."""
    for copy, source in _COPIES.items():
        if name.startswith(copy):
            return source + name.removeprefix(copy)
    return name
