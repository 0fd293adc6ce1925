"""DistributedDataParallel with options for gradient communication and for sharding of the optimizer state.

Lightning's DDPStrategy takes communication hooks as objects, on GPUs only, and does not save their state.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onecurve.errors import UserError, check_choice
from onecurve.network.precision import scales_loss
from onecurve.observe.step_times import timed_communication
from onecurve.parallel.gradients import weights_of
from onecurve.process.gather import all_gather
from onecurve.targets import locate


def _powersgd_in_order(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run the PowerSGD hook, and wait for it on a CPU.

    gloo continues a hook on its own threads. On some ranks its later reductions could then overtake those of other
    buckets. The hook seeds all generators and restores that of the CPU only.
    """
    buffer = bucket.buffer()
    with torch.random.fork_rng(devices=[buffer.device] if buffer.is_cuda else []):
        future = powerSGD_hook(state, bucket)
    if not buffer.is_cuda:
        future.wait()
    return future


HOOKS: dict[str, Any] = {
    "fp16": fp16_compress_hook,
    "bf16": bf16_compress_hook,
    "powersgd": _powersgd_in_order,
    "post_local_sgd": post_localSGD_hook,
}


def _hook(name: str) -> Any:
    if "." in name:
        return locate("strategy.comm_hook", name)
    check_choice("strategy.comm_hook", name, HOOKS)
    return HOOKS[name]


class DDP(DDPStrategy):
    """Gives every rank a full replica of the network and its part of the data.

    Args:
        comm_hook: communication of gradients; null leaves them unchanged. `fp16` and `bf16` reduce gradients in that
            type. `powersgd` reduces two low-rank factors of each gradient, with error feedback (Vogels et al., 2019),
            which starts anew when a run continues.
            `post_local_sgd` reduces no gradients: it averages the weights every `model_averaging_period` steps, and
            before validation and saving (Lin et al., "Don't use large mini-batches, use local SGD", 2020). A checkpoint
            then holds the averages of the optimizer states. The name of a function, such as `src.hooks.signs`, is a
            hook of your own: it gets None and a `dist.GradBucket`, and returns a future of the reduced gradients.
        comm_start_step: steps with plain averaging of gradients before `powersgd` or `post_local_sgd` begins.
        matrix_approximation_rank: rank of the PowerSGD factors.
        model_averaging_period: steps between two averages of the weights under `post_local_sgd`.
        shard_optimizer: each rank keeps the optimizer state of its part of the weights, updates these weights, and
            broadcasts them to the other ranks (ZeRO stage 1: Rajbhandari et al., 2020).
        gradient_as_bucket_view: gradients are views of the communication buckets, which saves one copy of them.
        shares: relative numbers of samples of the ranks, for devices of unequal speed; null means equal ones.
        **kwargs: further arguments of DistributedDataParallel, such as `bucket_cap_mb`.
    """

    hardware_options: Sequence[str] = ("shard_optimizer", "bucket_cap_mb", "gradient_as_bucket_view", "shares")

    def __init__(
        self,
        comm_hook: str | None = None,
        comm_start_step: int = 100,
        matrix_approximation_rank: int = 4,
        model_averaging_period: int = 4,
        shard_optimizer: bool = False,
        gradient_as_bucket_view: bool = True,
        shares: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["gradient_as_bucket_view"] = gradient_as_bucket_view
        super().__init__(**kwargs)
        own = inspect.signature(DDPStrategy).parameters
        self.ddp_options = {name: value for name, value in kwargs.items() if name not in own}
        self.comm_hook, self.comm_start_step, self.shard_optimizer = comm_hook, comm_start_step, shard_optimizer
        self.matrix_approximation_rank, self.shares = matrix_approximation_rank, shares
        self.model_averaging_period = model_averaging_period
        self.hook_state: Any = None
        self.averager: PeriodicModelAverager | None = None  # of the weights, under post-local SGD
        if comm_hook is not None:
            _hook(comm_hook)
        if comm_start_step < 2:
            raise UserError(f"strategy.comm_start_step={comm_start_step}: DDP fixes its buckets first; give 2 or more")
        if min(matrix_approximation_rank, model_averaging_period) < 1:
            raise UserError("strategy.matrix_approximation_rank and model_averaging_period: give at least 1")
        if comm_hook == "post_local_sgd" and shard_optimizer:
            raise UserError("strategy.shard_optimizer=true needs equal weights, but post_local_sgd lets them differ")

    reduce = timed_communication()(DDPStrategy.reduce)
    all_gather = timed_communication()(all_gather)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        has_own_weights = self.comm_hook == "post_local_sgd"  # each rank
        return super().distributed_sampler_kwargs | {"shares": self.shares, "has_own_weights": has_own_weights}

    def check_virtual_ranks(self, count: int, world_size: int) -> None:
        """Raise a UserError for a hook, which does not add gradients as they are."""
        if self.comm_hook:
            raise UserError(f"bit_exact=true adds gradients as they are: unset strategy.comm_hook={self.comm_hook}")

    @property
    def is_bit_exact(self) -> bool:
        return cast(Any, self.lightning_module).trainer.datamodule.bit_exact

    def setup(self, trainer: L.Trainer) -> None:
        self._check_options(trainer)
        if self.comm_hook == "post_local_sgd":  # torch's model averaging returns contiguous weights
            self.lightning_module.to(memory_format=torch.contiguous_format)
        super().setup(trainer)

    def _check_options(self, trainer: L.Trainer) -> None:
        if self.comm_hook == "bf16" and self.root_device.type == "cpu":
            raise UserError("strategy.comm_hook=bf16: DDP of torch takes that hook on GPUs only; take fp16")
        if self.comm_hook == "post_local_sgd":
            if any(getattr(callback, "averages_weights", False) for callback in trainer.callbacks):
                raise UserError("callbacks.ema averages each rank's own weights under post_local_sgd: leave out one")
            if not self.lightning_module.automatic_optimization:
                raise UserError("strategy.comm_hook=post_local_sgd averages the weights of one optimizer; take fp16")
        if self.comm_hook in ("powersgd", "post_local_sgd") and scales_loss(self.precision_plugin.precision):
            raise UserError(
                f"strategy.comm_hook={self.comm_hook} cannot handle the overflows of trainer.precision=16-mixed: "
                "take bf16-mixed"
            )
        if self.shard_optimizer and any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks):
            raise UserError(
                "strategy.shard_optimizer=true divides the groups of the optimizer, which a BaseFinetuning callback "
                "replaces when a run resumes: set it to false, or take strategy=fsdp"
            )

    def configure_ddp(self) -> None:
        """Wrap the module, and register the hook; with `bit_exact` do nothing: `VirtualRanks` adds the gradients."""
        if self.is_bit_exact:
            return
        module = cast(nn.Module, self.lightning_module)
        self._is_averaged: dict[Tensor, bool] = {weight: weight.requires_grad for weight in module.parameters()}
        # Lightning builds DDP on a side stream, for capture in a CUDA graph (strategies/ddp.py:194 in 2.6.6).
        # Gradients would then accumulate on that stream, and each backward pass would wait for the other one:
        # https://github.com/Lightning-AI/pytorch-lightning/issues/21567
        self.model = DistributedDataParallel(module, device_ids=self.determine_ddp_device_ids(), **self.ddp_options)
        if self.comm_hook == "powersgd":
            self.hook_state = PowerSGDState(None, self.matrix_approximation_rank, self.comm_start_step)
        elif self.comm_hook == "post_local_sgd":
            self.hook_state = PostLocalSGDState(None, None, self.comm_start_step, post_local_gradient_allreduce=False)
            self.averager = PeriodicModelAverager(self.model_averaging_period, warmup_steps=self.comm_start_step)
        if self.comm_hook:
            self.model.register_comm_hook(self.hook_state, _hook(self.comm_hook))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin anew after weights were frozen, unfrozen or added: DDP averages those that it has found trainable."""
        if self.is_bit_exact:
            return
        weights = [*self._is_averaged, *weights_of(self.optimizers)]
        if any(weight.requires_grad != self._is_averaged.get(weight) for weight in weights):
            self.configure_ddp()
            self.on_train_start()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        plugin, module = self.precision_plugin, cast(L.LightningModule, self.lightning_module)
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._check_gradients(module)  # before `on_after_backward`, in which the module may drop some
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _check_gradients(self, module: L.LightningModule) -> None:
        """Check that DDP has averaged the gradients: it cannot without all that it waits for, nor those of others."""
        model: Any = self.model  # not wrapped if virtual ranks are added
        may_skip = self.is_bit_exact or model.find_unused_parameters or not module.automatic_optimization
        if may_skip or not model.require_backward_grad_sync:
            return
        for weight, is_averaged in self._is_averaged.items():
            has_gradient = weight.grad is not None
            if is_averaged and not has_gradient:
                raise UserError(
                    f"DDP waits for the gradient of {_name_of(weight, module)}, which the loss does not use: remove "
                    "or freeze the parameter, or set +strategy.find_unused_parameters=true"
                )
            if has_gradient and not is_averaged:
                raise UserError(
                    f"DDP does not average the gradient of {_name_of(weight, module)}, which was frozen when it began: "
                    "let the parameter be trainable from the start"
                )

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.shard_optimizer:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # the import is slow

            warnings.filterwarnings("ignore", "Seems like `optimizer.step")  # false alarm: ZeRO wraps the optimizer
            optimizers = self.optimizers
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            if any(group.get("fused") or group.get("capturable") for group in groups):
                raise UserError("strategy.shard_optimizer=true keeps step counts on the CPU: take no fused optimizer")
            self.optimizers = [
                ZeroRedundancyOptimizer([dict(group) for group in optimizer.param_groups], type(optimizer))
                for optimizer in optimizers
            ]
            for optimizer in self.optimizers:  # or a hook would change a state that is not that of the steps
                _share_state(optimizer)
                optimizer.register_load_state_dict_post_hook(_share_state)
            # Each once: one may be in two attributes of another.
            for schedule in {one for config in self.lr_scheduler_configs for one in _with_inner(config.scheduler)}:
                schedule.optimizer = self.optimizers[optimizers.index(schedule.optimizer)]

    def on_train_start(self) -> None:
        """Give the averaging of weights the step that it would have in an uninterrupted run."""
        if self.averager is not None:
            self.hook_state.iter = self.averager.step = self.lightning_module.trainer.global_step

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        if self.averager is not None:
            weights = [weight for weight in weights_of([optimizer]) if weight.grad is not None]
            self.averager.average_parameters(cast(Any, iter(weights)))
        return result

    def on_validation_start(self) -> None:
        self._average(self.lightning_module.parameters())

    on_train_end = on_validation_start

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._average(self.lightning_module.parameters())
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._average(value for moments in optimizer.state.values() for value in moments.values())
        return super().optimizer_state(optimizer)

    def _average(self, values: Iterable[Any]) -> None:
        """Under post-local SGD, average the tensors over all ranks, in place. Every rank must call it."""
        if self.averager is not None:
            floats = [value for value in values if isinstance(value, Tensor) and value.ndim]  # no step counts
            average_parameters(cast(Any, iter(floats)), self.averager.process_group)


def _name_of(weight: Tensor, module: L.LightningModule) -> str:
    return next((name for name, one in module.named_parameters() if one is weight), "a weight")


def _with_inner(schedule: Any) -> Iterator[Any]:
    """Yield a schedule and those in it, as of a SequentialLR: each of them has the optimizer."""
    yield schedule
    for value in vars(schedule).values():
        for inner in value if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, LRScheduler):
                yield from _with_inner(inner)


def _share_state(optimizer: Any) -> None:
    """Let a ZeroRedundancyOptimizer show the state of its part, which takes the steps."""
    optimizer.state = optimizer.optim.state


def auto(devices: int | list[int], num_nodes: int) -> DDP | str:
    """Return the argument of `Trainer(strategy=...)` for a number of devices per node, or their indices."""
    count = devices if isinstance(devices, int) else len(devices)
    return DDP() if count * num_nodes > 1 else "auto"
