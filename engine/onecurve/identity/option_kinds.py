"""The two kinds of options: the experiment is what a run computes, and the hardware is how it computes that.

Two runs with the same options of the experiment have one curve, whatever their hardware. Every option counts as
experiment unless it is declared as hardware: by the class that takes it, in a tuple `hardware_options`, or here, if
the class is another library's. An option that changes no curve only if others have certain values is not declared.
`NODE.*` also stands for the node itself.
"""

from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf

from onecurve.network.net import NET
from onecurve.targets import default_options, locate

HARDWARE = """
    ckpt_path resume fit test predict doctor plan hardware.* report tags optimized_metric run_dir runtime.* logger.*
    launch.function launch.timeout launch.max_restarts launch.elastic launch.min_devices launch.probe
    optimizer.compile optimizer.fused optimizer.foreach optimizer.capturable data.batch_size_per_device
    trainer._target_ trainer.accelerator trainer.devices trainer.num_nodes trainer.accumulate_grad_batches
    trainer.max_time.* trainer.log_every_n_steps trainer.num_sanity_val_steps trainer.limit_predict_batches
    trainer.enable_progress_bar trainer.enable_model_summary trainer.enable_checkpointing
    trainer.enable_autolog_hparams trainer.deterministic trainer.benchmark trainer.inference_mode
    trainer.detect_anomaly trainer.barebones trainer.profiler.*
    trainer.use_distributed_sampler trainer.strategy trainer.logger trainer.callbacks trainer.plugins
    trainer.default_root_dir trainer.model_registry trainer.timeout trainer.config
    strategy._target_ strategy.devices strategy.num_nodes strategy.single_process strategy.accelerator
    strategy.parallel_devices strategy.cluster_environment strategy.checkpoint_io strategy.precision_plugin
    strategy.process_group_backend strategy.start_method strategy.timeout
    callbacks.best.* callbacks.checkpoint.* callbacks.progress_bar.* callbacks.timeline.* callbacks.throughput.*
    callbacks.gradients.* callbacks.evaluation.* callbacks.samples.* callbacks.pruning.trial
    callbacks.early_stopping.verbose
    data.root data.data_dir data.num_workers data.pin_memory data.persistent_workers data.prefetch_factor
""".split()

# Values of hardware options that make another experiment, as NAME=VALUE.
EXPERIMENT_VALUES = ["strategy._target_=onecurve.parallel.dp.DP"]

# A continued run may change these: longer training, hyper-parameters, callbacks, and what it evaluates.
CONTINUABLE = """
    trainer.max_epochs trainer.min_epochs trainer.max_steps trainer.min_steps optimizer.*
    scheduler.* callbacks.* trainer.limit_val_batches trainer.limit_test_batches trainer.check_val_every_n_epoch
    trainer.val_check_interval
""".split()

_COPIES = {  # nodes of conf/ that interpolate another one
    f"module.{NET}.": "model.",
    "module.optimizer.": "optimizer.",
    "module.schedule.": "scheduler.",
    "data.seed": "seed",
}


def matches(name: str, patterns: list[str]) -> bool:
    """Return whether a pattern matches the dotted name of an option or node."""
    return any(fnmatchcase(name, pattern) or name == pattern.removesuffix(".*") for pattern in patterns)


def is_experiment(config: DictConfig, name: str, value: Any) -> bool:
    """Return whether an option with that value belongs to the experiment."""
    if f"{name}={value}" in EXPERIMENT_VALUES:
        return True
    node, _, key = name.rpartition(".")
    target = OmegaConf.select(config, f"{node}._target_") if node else None
    found = locate(f"{node}._target_", target) if target else None
    parts = getattr(found, "__mro__", (found,))  # a class adds to what its base classes declare
    if any(key in getattr(part, "__dict__", {}).get("hardware_options", ()) for part in parts):
        return False
    return not matches(name, HARDWARE)


def experiment_options(config: DictConfig) -> dict[str, Any]:
    """Return the options of the experiment of a resolved configuration, by dotted name.

    An option at the default of its class counts as absent, since the class of another strategy may not have it.
    """
    flat = flatten_config(OmegaConf.to_container(config))
    return {
        name: value
        for name, value in flat.items()
        if is_experiment(config, name, value) and not _is_copy(name, flat) and value != default_value(config, name)
    }


def default_value(config: DictConfig, name: str) -> Any:
    """Return the default of an option in the signature of its class, or None."""
    node, _, key = name.rpartition(".")
    target = OmegaConf.select(config, f"{node}._target_")
    return default_options(target).get(key) if target else None


def _is_copy(name: str, flat: dict[str, Any]) -> bool:
    """Return whether an option has the value of the one that it interpolates in conf/."""
    sources = [source + name.removeprefix(copy) for copy, source in _COPIES.items() if name.startswith(copy)]
    return any(source in flat and flat[source] == flat[name] for source in sources)


def flatten_config(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to {dotted name: value}."""
    if not isinstance(node, dict):
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, child in node.items():
        flat |= flatten_config(child, f"{prefix}.{key}".strip("."))
    return flat
