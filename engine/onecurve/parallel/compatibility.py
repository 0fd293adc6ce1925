"""The strategy that a script names; checks of what a strategy supports, with a clear message before Lightning fails."""

import os
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from onecurve.errors import UserError, check_choice
from onecurve.parallel.ddp import auto
from onecurve.parallel.sharded_state import ShardedStateStrategy, divided_by
from onecurve.patches.torch import gradient_hooks
from onecurve.process.started_by import started_by
from onecurve.targets import locate

_STRATEGIES = {
    "ddp": "onecurve.parallel.ddp.DDP",
    "ddp_spawn": "onecurve.parallel.ddp_spawn.DDPSpawn",
    "dp": "onecurve.parallel.dp.DP",
    "fsdp": "onecurve.parallel.fsdp.FSDP",
    "pipeline": "onecurve.parallel.pipeline.pipeline.Pipeline",
}
_UNUSED = "ddp_find_unused_parameters_"  # Lightning's names of DDP with that option, which end with true or false


def resolve_strategy(strategy: Any, devices: int | list[int], num_nodes: int) -> Any:
    """Return the strategy of a name that a script gives, for a number of devices per node, or their indices.

    A strategy that is given as an object is returned as it is: train.py builds those of conf/strategy.
    """
    if strategy == "auto":
        return auto(devices, num_nodes)
    if not isinstance(strategy, str):
        return strategy
    if strategy in (f"{_UNUSED}true", f"{_UNUSED}false"):
        return locate("strategy", _STRATEGIES["ddp"])(find_unused_parameters=strategy == f"{_UNUSED}true")
    check_choice("strategy", strategy, ["auto", *_STRATEGIES])
    return locate("strategy", _STRATEGIES[strategy])()


def check_can_train(strategy: Any, module: L.LightningModule) -> None:
    """Check that the strategy can train the module: with manual optimization each rank needs a full replica."""
    if any(divided_by[part]() is not strategy for part in module.modules() if part in divided_by):
        raise UserError(
            f"{type(module).__name__} has layers that another trainer has divided among the ranks: go on with that "
            "trainer, or load a checkpoint of it into a new module"
        )
    name = type(strategy).__name__.removesuffix("Strategy").lower()
    if not module.automatic_optimization and not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        raise UserError(
            f"strategy={name} supports only one optimizer, but {type(module).__name__} optimizes manually, with "
            "several: set strategy=ddp, or auto"
        )
    _check_needs(strategy, name, module)
    # Also of a user's class.
    kinds = {kind.__name__.removesuffix("Strategy").lower() for kind in type(strategy).__mro__}
    shards = "fsdp" in {*kinds, getattr(strategy, "data_parallel", "")}
    for weight_name, weight in module.named_parameters():
        # FSDP makes new parameters, also of the stages of a pipeline, and pickling for spawned processes drops hooks.
        if (shards or "ddpspawn" in kinds) and any(gradient_hooks(weight)):
            raise UserError(f"this strategy would lose the hook of the parameter {weight_name}: use strategy=ddp")
        if shards and weight.ndim == 0:
            raise UserError(
                f"FSDP cannot shard the scalar {weight_name}: give it a dense weight of one dimension, or use "
                "strategy=ddp"
            )


def _check_needs(strategy: Any, name: str, module: L.LightningModule) -> None:
    module_name = type(module).__name__
    for attribute, meaning in getattr(strategy, "module_needs", {}).items():
        if not getattr(module, attribute, None):
            raise UserError(f"strategy={name} needs {module_name}.{attribute}, {meaning}, or use strategy=ddp or fsdp")
        if attribute == "loss" and isinstance(module.loss, nn.Module):
            raise UserError(
                f"strategy={name} calls {module_name}.loss(outputs, batch), which is a layer: give the layer another "
                "name, and call it in a method `loss`"
            )


def check_callbacks(trainer: L.Trainer) -> None:
    """Check that no callback of Lightning averages or prunes all weights, of which a sharded rank has a part."""
    if not isinstance(trainer.strategy, ShardedStateStrategy):
        return
    for one in trainer.callbacks:
        if isinstance(one, WeightAveraging | StochasticWeightAveraging):
            raise UserError(
                f"{type(one).__name__} averages a copy of the network, of which a rank here has a part: "
                "take callbacks=ema, or strategy=ddp"
            )
        if isinstance(one, ModelPruning):
            raise UserError("ModelPruning compares all weights, of which a rank here has a part: take strategy=ddp")


def check_can_divide_steps(trainer: Any, module: L.LightningModule) -> None:
    """Check that steps can be divided among the started processes, into micro-batches, or virtual ranks one by one."""
    accumulate, devices = trainer.accumulate, trainer.num_devices * trainer.num_nodes
    started = int(os.environ["WORLD_SIZE"]) if started_by() == "torchrun" else devices
    if started != devices:
        raise UserError(
            f"torchrun has started {started} processes, but devices={trainer.num_devices} and num_nodes="
            f"{trainer.num_nodes}: give the trainer as many devices as there are processes on a node"
        )
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise UserError(f"trainer.accumulate_grad_batches={accumulate}: give a number of micro-batches, at least one")
    if not module.automatic_optimization and (accumulate > 1 or trainer.bit_exact):
        option = "bit_exact=true" if trainer.bit_exact else f"trainer.accumulate_grad_batches={accumulate}"
        raise UserError(
            f"{option} divides each step into parts, but {type(module).__name__} optimizes manually, and so divides "
            "its steps itself: unset it, or let the module optimize automatically"
        )
    if trainer.bit_exact or accumulate > 1 or devices > 1:
        _check_parts(module, trainer.bit_exact)
    if trainer.bit_exact and accumulate > 1:
        raise UserError(
            f"bit_exact=true computes a step in virtual_ranks={trainer.virtual_ranks} passes already: set "
            f"trainer.accumulate_grad_batches=1 (now {accumulate})"
        )
    if trainer.bit_exact:
        check_can_be_bit_exact(trainer.strategy, trainer.virtual_ranks, devices)


def _check_parts(module: L.LightningModule, bit_exact: bool) -> None:
    """Check that no layer gives sparse gradients or changes its weights in the forward pass, as nn.Embedding may.

    Without `bit_exact`, no hook may take the gradient of a process or a micro-batch for that of the step.
    """
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag):
            continue
        if part.sparse:
            # With gloo, DDP of torch 2.13 divides the dense gradients twice if there is a sparse one.
            raise UserError(
                f"{name} has sparse=True, and ranks, micro-batches and virtual ranks add dense gradients: set "
                "sparse=False, or train undivided on one device"
            )
        if part.max_norm is not None:
            raise UserError(
                f"{name} has max_norm, so its forward pass writes into the weights of the samples that a process, "
                "micro-batch or virtual rank has: normalize its outputs, or train on one device"
            )
    for name, weight in module.named_parameters():
        if not bit_exact and gradient_hooks(weight)[1]:
            raise UserError(
                f"{name} has a hook of register_post_accumulate_grad_hook, which gets the gradient of each process or "
                "micro-batch: use the hook on_before_optimizer_step of the module, or set bit_exact=true"
            )


def check_can_be_bit_exact(strategy: Any, count: int, world_size: int) -> None:
    if isinstance(strategy, SingleDeviceStrategy):
        return
    if not hasattr(strategy, "check_virtual_ranks"):
        raise UserError(
            f"bit_exact=true: {type(strategy).__name__} adds gradients in an order of its own: take strategy=auto, "
            "ddp, fsdp or pipeline"
        )
    strategy.check_virtual_ranks(count, world_size)
