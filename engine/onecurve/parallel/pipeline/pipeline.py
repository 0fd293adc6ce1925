"""Pipeline parallelism: each rank holds some blocks of the network, and micro-batches pass through all ranks.

The strategy runs `torch.distributed.pipelining` inside Lightning, without changes to network or LightningModule. A
schedule interleaves forward and backward passes, so all of it runs when `training_step` calls the network, with what it
gives the network. The strategy keeps its gradients until Lightning calls `backward`. The outputs go to every rank,
where `training_step` goes on, computes the loss and logs.

Huang et al., "GPipe" (2018); Narayanan et al., "Efficient large-scale language model training on GPU clusters" (2021);
Qi et al., "Zero bubble pipeline parallelism" (2023).
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from onecurve.data.batch import Batch
from onecurve.errors import UserError, check_choice
from onecurve.network.module_state import without_log
from onecurve.network.net import NET, network_of
from onecurve.network.precision import scales_loss
from onecurve.observe.step_times import timed_communication, timed_computation
from onecurve.observe.steps import is_compared_step
from onecurve.parallel.gradients import average_over, clip_by_norm_over
from onecurve.parallel.pipeline.blocks import Block, constants, ordered_blocks
from onecurve.parallel.pipeline.rehearsal import check_module, check_stages, check_updates, input_of_network
from onecurve.parallel.pipeline.schedules import SCHEDULES, build_schedule
from onecurve.parallel.pipeline.split import cut, format_table
from onecurve.parallel.pipeline.stage import (
    Stage,
    build_stages,
    called_modules,
    check_shape,
    join_samples,
    keep_parameters,
    micro_batch,
    remove_other_stages,
    shard_stage,
    split_samples,
    stage_inputs,
    values_sent,
)
from onecurve.parallel.pipeline.virtual_ranks import StageRanks
from onecurve.parallel.sharded_state import ShardedStateStrategy
from onecurve.process.gather import gather_objects
from onecurve.random.dropout import dropouts
from onecurve.random.random_functions import sample_random

_log = logging.getLogger(__name__)


class Pipeline(ShardedStateStrategy):
    """Assigns the blocks of the network to stages on the ranks; more ranks than `stages` form replicas of the pipeline.

    Args:
        stages: ranks of one pipeline; null means all ranks.
        schedule: gpipe, 1f1b, interleaved_1f1b, interleaved_zero_bubble or zbv_zero_bubble. Each of the last three
            gives every rank two stages.
        microbatches: number of micro-batches per batch of a rank. With one, only one rank works at a time.
        split: `auto`, or the names of the blocks before which to cut.
        data_parallel: `ddp` gives each replica full stages, and `fsdp` shards each stage over the replicas (FSDP2).
        **kwargs: arguments of ShardedStateStrategy.
    """

    hardware_options: Sequence[str] = ("stages", "schedule", "microbatches", "split", "data_parallel")
    virtual_rank_passes: ClassVar = StageRanks
    module_needs: ClassVar = {
        NET: "the network to split: rename its attribute",
        "loss": "which maps outputs and a batch to the mean loss: add it",
    }

    def __init__(
        self,
        stages: int | None = None,
        schedule: str = "1f1b",
        microbatches: int = 4,
        split: str | Sequence[str] = "auto",
        data_parallel: str = "ddp",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_choice("strategy.schedule", schedule, SCHEDULES)
        check_choice("strategy.data_parallel", data_parallel, ("ddp", "fsdp"))
        if not isinstance(microbatches, int) or microbatches < 1:
            raise UserError(f"strategy.microbatches={microbatches}: give a number of at least one")
        self.stages, self.schedule, self.spec = stages, schedule, SCHEDULES[schedule]
        self.microbatches, self.split, self.data_parallel = microbatches, split, data_parallel
        self.training_forward: Callable[[Tensor], Tensor] | None = None  # of the network within a training step
        # Called when the optimizers have been set up, for which the network is whole; then None.
        self._remove_other_stages: Callable[[], None] | None = None
        self._losses: list[Tensor] | None = None  # of the micro-batches, on the last stage's rank; None before they run
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []  # the schedule's gradients, until `backward`

    @property
    def _is_sharded(self) -> bool:
        return self.data_parallel == "fsdp" and self._replicas.size() > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {
            "num_replicas": self._replicas.size(),
            "rank": self._replicas.get_local_rank(),
            "num_microbatches": 1 if self.is_bit_exact else self.microbatches,  # which then are virtual ranks
            "shares": self.shares,
            "group": self._replicas.get_group(),
            "model_group": dist.group.WORLD if self._is_sharded else self._group,
        }

    def check_world_size(self, world_size: int) -> None:
        """Raise a UserError unless each replica has a rank per stage; an elastic launcher asks as well."""
        ranks = self.stages or world_size
        if ranks < 1 or world_size % ranks:
            raise UserError(f"strategy.stages={ranks} does not divide the {world_size} processes: take a divisor")

    def check_virtual_ranks(self, count: int, world_size: int) -> None:
        """Raise a UserError for stages that the replicas share, whose gradients they add in another order."""
        if self.data_parallel == "fsdp":
            raise UserError("bit_exact=true: strategy.data_parallel=fsdp adds gradients in another order: take ddp")

    def check_precision(self, precision: str) -> None:
        if scales_loss(precision):
            raise UserError("trainer.precision=16-mixed scales the loss, which a schedule does not: take bf16-mixed")

    def make_mesh(self) -> DeviceMesh:
        self.check_world_size(self.world_size)
        ranks = self.stages or self.world_size
        self.check_precision(self.precision_plugin.precision)
        shape, names = (self.world_size // ranks, ranks), ("data_parallel", "pipeline")
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self._replicas = mesh["data_parallel"]  # a look-up takes two milliseconds
        self._group, self._pipeline_rank = mesh["pipeline"].get_group(), mesh["pipeline"].get_local_rank()
        return mesh

    def parallelize(self, module: L.LightningModule) -> None:
        """Keep the blocks of this rank's stages, and replace the forward pass of the network with the pipeline."""
        self.check_options(module)
        check_module(module)
        net: nn.Module = network_of(module)
        self.precision_plugin.clip_grad_by_norm = partial(clip_by_norm_over, self._group)  # type: ignore[method-assign]
        self._set_memory_format(net)
        if self.is_bit_exact:
            data = cast(Any, module.trainer).datamodule
            self.microbatches = len(data.parallel.virtual_ranks(data.virtual_ranks))
        self._stage_to_rank = self.spec.stage_to_rank(self.device_mesh["pipeline"].size())
        blocks, stages = self._build_stages(module, net)
        self._random_calls = sum(stage.calls for stage in stages)  # in a forward pass of the network in training
        self._has_random_calls = self._random_calls > 0 or bool(dropouts(net))
        self._keep_own_stages(net, blocks, stages)
        self.sent = values_sent(blocks)  # meta tensors like the inputs of the network and the outputs of each stage
        built = build_stages(self.own_stages, self.sent, self._group, self.root_device)
        self._torch_schedule = build_schedule(self.schedule, built, self.microbatches, self._loss)
        self._remove_other_stages = partial(remove_other_stages, net, blocks, self.own_stages)
        if cast(Any, module).trainer.state.fn != TrainerFn.FITTING:
            self._cut()
        net.forward = self._forward
        if self.is_global_zero:
            self._log_stages(blocks)

    def check_options(self, module: Any) -> None:
        if getattr(module, "should_compile", False):
            raise UserError("module.compile=true compiles the full network, of which a pipeline's rank holds a part")
        if self.spec.splits_backward and getattr(module, "recompute", "none") != "none":
            raise UserError(
                f"strategy.schedule={self.schedule} splits the backward pass, which module.recompute=blocks would then "
                "compute twice: take strategy.schedule=interleaved_1f1b"
            )

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Let the module choose parameter groups from the full network; keep the parameters of the own stages."""
        super().setup_optimizers(trainer)
        check_updates(trainer, self.optimizers, is_cut=self._remove_other_stages is None)
        self._cut()
        self._parameters = list(trainer.lightning_module.parameters())
        for optimizer in self.optimizers:
            keep_parameters(optimizer, set(self._parameters))

    def _cut(self) -> None:
        if self._remove_other_stages:
            self._remove_other_stages()
            self._remove_other_stages = None  # it refers to the parameters of all stages

    def _set_memory_format(self, net: nn.Module) -> None:
        # torch's GroupNorm would crash with channels last: docs/upstream/group_norm.md. FSDP supports no other format.
        crashes = self.spec.splits_backward and self.root_device.type == "cpu"
        if self._is_sharded or (crashes and any(isinstance(part, nn.GroupNorm) for part in net.modules())):
            net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

    def _build_stages(self, module: L.LightningModule, net: nn.Module) -> tuple[list[list[Block]], list[Stage]]:
        """Return the blocks of each stage, and all stages, after a comparison of these with the network."""
        inputs, batch = self._example(module)
        with self.precision_plugin.forward_context():
            in_order = ordered_blocks(net, inputs)
        blocks = cut(in_order, len(self._stage_to_rank), self.split)
        stages = [Stage(net, part, stage_inputs(blocks, number)) for number, part in enumerate(blocks)]
        with self.precision_plugin.forward_context(), without_log(module):
            check_stages(net, stages, inputs, lambda outputs: cast(Any, module).loss(outputs, batch), self.schedule)
        uses = Counter(layer for stage in stages for layer in dropouts(stage))
        for name, part in net.named_modules():
            if uses[part] > 1:
                raise UserError(
                    f"strategy=pipeline: two stages call the dropout layer {name}, and each would count its own calls: "
                    "give each place a layer of its own, or use strategy=ddp or fsdp"
                )
        for number, stage in enumerate(stages):
            stage.calls_before = sum(before.calls for before in stages[:number])
        return blocks, stages

    def _keep_own_stages(self, net: nn.Module, blocks: list[list[Block]], stages: list[Stage]) -> None:
        ranks = enumerate(self._stage_to_rank)
        self.own_stages = {number: stages[number] for number, rank in ranks if rank == self._pipeline_rank}
        self._called = called_modules(block for part in blocks for block in part)
        self._constants = constants(net, self._called)
        if self._is_sharded:
            for stage in self.own_stages.values():
                shard_stage(net, stage, self._replicas)

    def _example(self, module: L.LightningModule) -> tuple[Tensor, Any]:
        """Return a micro-batch of the inputs of the network, and of the data."""
        data = cast(Any, module.trainer).datamodule
        parts = 1 if self.is_bit_exact else self.microbatches
        count = data.layout.samples_per_batch if data.has_training_data else 2 * parts
        batch = self.batch_to_device(self.precision_plugin.convert_input(data.example_batch(count)))
        inputs = micro_batch(input_of_network(module, batch), 0, parts).contiguous()
        return inputs, micro_batch(batch, 0, parts)

    def _log_stages(self, stages: list[list[Block]]) -> None:
        bubble = self.spec.bubble(self.device_mesh["pipeline"].size(), self.microbatches)
        title = f"  pipeline: {self.schedule}, {self.microbatches} micro-batches, bubble of at least {bubble:.1%}"
        _log.info("\n".join([title, *format_table(stages, self._stage_to_rank)]))

    def _loss(self, outputs: tuple[Tensor], number: Tensor) -> Tensor:
        """Return the loss of micro-batch `number`, a CPU tensor because the schedule splits a tensor of targets."""
        with timed_computation():
            loss = cast(Any, self.lightning_module).loss(outputs[0], self._micro_batches[int(number)])
        return loss if self._divisor == 1 else loss / self._divisor

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training_forward is not None:  # in the pass of a virtual rank
            return super().training_step(batch, *args, **kwargs)
        micro_batches = [micro_batch(batch, number, self.microbatches) for number in range(self.microbatches)]
        self._losses = None
        self.training_forward = partial(self._train_batch, micro_batches)
        try:
            result = super().training_step(batch, *args, **kwargs)
        finally:
            self.training_forward = None
        returned = result["loss"] if isinstance(result, dict) else result
        if self._losses is not None and isinstance(returned, Tensor):
            self.compare_loss(returned.detach())
        return result

    def compare_loss(self, loss: Tensor) -> None:
        """Check that `training_step` returns the trained loss on every rank; later steps may add terms to the first."""
        if not is_compared_step(cast(Any, self.lightning_module).trainer):
            return
        losses = [one.detach() for one in self._losses or [loss]]  # the last stage's rank has those of the schedule
        precision = max(torch.finfo(one.dtype).eps for one in (loss, *losses))
        rows = gather_objects((float(loss), float(torch.stack(losses).sum()), precision), self._group)
        returned, sums, precisions = torch.tensor(rows, dtype=torch.float64).unbind(1)
        trained = sums[self._stage_to_rank[-1]]
        tolerance = float(precisions.max()) ** 0.75  # of a few sums; ranks differ if it reads a rank's weights
        if not torch.allclose(returned, trained, rtol=tolerance, atol=tolerance / 10, equal_nan=True):
            name = type(self.lightning_module).__name__
            raise UserError(
                f"strategy=pipeline trains the mean of {name}.loss(outputs, batch), {float(trained):.6g} here, but "
                f"training_step returns {returned.tolist()} on the ranks: let it return that loss. One with class "
                "weights or masks needs bit_exact=true, one with a penalty of the parameters strategy=ddp or fsdp"
            )

    def _check_constants(self) -> None:
        """Check that no number has changed which the graph of the network has as a constant."""
        now = constants(network_of(self.lightning_module), self._called)
        for name, value in now.items() - self._constants.items():
            raise UserError(
                f"strategy=pipeline: `net.{name.removeprefix('.')}` has changed to {value}, which the stages do not "
                "see: register it as a buffer and change that in place, or use strategy=ddp or fsdp"
            )

    @timed_communication()  # between the passes a rank waits
    def _train_batch(self, micro_batches: Sequence[Any], inputs: Tensor) -> Tensor:
        """Train a batch from the inputs of the network; return its (samples, ...) outputs on every rank."""
        count, seed = len(micro_batches), torch.initial_seed()
        # There may be more keys than rows, if the dataset makes batches.
        keys = sample_random.keys if self._has_random_calls else None
        parts = split_samples(inputs, count)
        check_shape(parts[0], self.sent[0][0], is_trained=True)
        outputs = self.run_schedule(
            parts.flatten(0, 1),
            micro_batches,
            divisor=1 if isinstance(micro_batches[0], Batch) else count,  # a Batch has weights, whose sum over all is 1
            keys=None if keys is None else split_samples(keys, count).contiguous(),
        )
        if keys is not None:
            sample_random.begin_micro_batch(keys, seed + self._random_calls)
        return join_samples(outputs, count)

    def run_schedule(self, inputs: Tensor, micro_batches: Sequence[Any], divisor: int, keys: Tensor | None) -> Tensor:
        """Run the forward and the backward passes of all micro-batches; return their outputs on every rank.

        `_gradients` gets the gradients; those of the parameters stay as they were, until Lightning resets them.

        Args:
            inputs: those of the network, one micro-batch after the other, as are the outputs.
            micro_batches: what `loss` takes.
            divisor: divides the losses.
            keys: (micro-batches, n) keys of the samples' random numbers; None if the network draws none.
        """
        self._check_constants()
        self._losses, self._micro_batches, self._divisor = [], micro_batches, divisor
        before = [weight.grad for weight in self._parameters]
        for weight in self._parameters:
            weight.grad = None
        for stage in self.own_stages.values():
            stage.keys, stage.seed = keys, torch.initial_seed()  # which counts the calls of layers before the network
        with torch.enable_grad():
            targets = torch.arange(self.microbatches)
            outputs = self._torch_schedule.step(inputs, target=targets, losses=self._losses)
        self._gradients = [(weight, weight.grad) for weight in self._parameters if weight.grad is not None]
        for weight, gradient in zip(self._parameters, before, strict=True):
            weight.grad = gradient
        own = () if outputs is None else (outputs[0].detach().contiguous(),)
        return self._broadcast(len(self._stage_to_rank) - 1, own, len(inputs))[0]

    def _refuse_second_call(self, _: Tensor) -> NoReturn:
        raise UserError(
            f"strategy=pipeline: {type(self.lightning_module).__name__}.training_step calls its `net` twice: call "
            "it once, or use strategy=ddp or fsdp"
        )

    def _run_stages(self, inputs: Tensor) -> Tensor:
        """Evaluate one stage after the other, each on its rank; return the outputs of the network on every rank."""
        values: tuple[Tensor, ...] = (inputs,)
        for number in range(len(self._stage_to_rank)):
            stage = self.own_stages.get(number)
            values = self._broadcast(number, stage(*values) if stage else (), len(inputs))
            if stage and stage.calls:  # the stages before it have not drawn theirs on this rank
                raise sample_random.refusal("the evaluation of a pipeline's stage")
            if isinstance(stage, FSDPModule):
                stage.reshard()
        return values[0]

    def _broadcast(self, number: int, own: tuple[Tensor, ...], samples: int) -> tuple[Tensor, ...]:
        """Return the outputs of a stage for some samples on every rank; `own` has them on the rank of the stage."""
        rank = self._stage_to_rank[number]
        likes = [] if own else self.sent[number + 1]
        values = own or tuple(torch.empty(samples, *x.shape[1:], dtype=x.dtype, device=self.root_device) for x in likes)
        for value in values:
            dist.broadcast(value, group=self._group, group_src=rank)
        return values

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Add the gradients of the schedule to the parameters, averaged over the replicas."""
        module = cast(Any, self.lightning_module)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        accumulate = module.trainer.datamodule.accumulate
        # FSDP2 has averaged them; with bit_exact there are none here, because the sums over virtual ranks took them.
        # DDP, which averages in hooks of the weights, is not used: a schedule bypasses these.
        if not (self._is_sharded or self.is_bit_exact):
            average_over(self._replicas.get_group(), [gradient for _, gradient in self._gradients])
        for weight, gradient in self._gradients:
            if accumulate > 1:  # run/step.py divides a loss that the schedule does not see
                gradient.div_(accumulate)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self._gradients = []
        return self.precision_plugin.post_backward(closure_loss, module)

    def _forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the network: those of the schedule in training, otherwise those of `_run_stages`."""
        check_shape(inputs, self.sent[0][0], is_trained=False)
        if self.training_forward is None:
            return self._run_stages(inputs)
        forward, self.training_forward = self.training_forward, self._refuse_second_call
        return forward(inputs)

    def return_scheduled(self, outputs: Tensor, _: Tensor) -> Tensor:
        """Return outputs that the schedule has computed, and leave torch's generator as their random calls do."""
        if self._random_calls:
            torch.default_generator.manual_seed(torch.initial_seed() + self._random_calls)
        return outputs

    @property
    def owns_state(self) -> bool:
        return self._replicas.get_local_rank() == 0

    def gather_state(self, own: Any) -> list[Any]:
        if not self.owns_state:
            return []
        parts: list[Any] | None = [None] * dist.get_world_size(self._group) if self._pipeline_rank == 0 else None
        dist.gather_object(own, parts, group=self._group, group_dst=0)
        return parts or []
