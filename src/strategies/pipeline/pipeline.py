"""Pipeline parallelism: each rank holds some blocks of the network, and micro-batches pass through all ranks.

The strategy runs `torch.distributed.pipelining` inside Lightning, without changes to network or LightningModule. A
schedule interleaves forward and backward passes, so it runs in `training_step`. Its gradients are held until Lightning
calls `backward`. The logits go to every rank, where the module's `training_step` computes loss and logs from them.

Huang et al., "GPipe" (2018); Narayanan et al., "Efficient large-scale language model training on GPU clusters" (2021);
Qi et al., "Zero bubble pipeline parallelism" (2023).
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.optim import Optimizer

from src.data.batch import Batch
from src.strategies.gradients import average_over, clip_by_norm_over
from src.strategies.pipeline.schedules import build_schedule, schedule_spec
from src.strategies.pipeline.split import Block, Stage, cut, ordered_blocks, table
from src.strategies.pipeline.stage_forward import StageForward
from src.strategies.sharded_state import ShardedStateStrategy
from src.strategies.sync_batchnorm import SyncedBatchNorm
from src.utils.errors import UserError

_log = logging.getLogger(__name__)


class Pipeline(ShardedStateStrategy):
    """Assigns the blocks of the network to stages on the ranks; more ranks than `stages` form replicas of the pipeline.

    Args:
        stages: ranks of one pipeline; null means all ranks.
        schedule: gpipe, 1f1b, interleaved_1f1b, interleaved_zero_bubble or zbv_zero_bubble. Each of the last three
            gives every rank two stages.
        microbatches: number of micro-batches per batch of a rank. With one, only one rank works at a time. Batch
            normalization uses the statistics of a micro-batch.
        split: `auto`, or the names of the blocks before which to cut.
        data_parallel: `ddp` gives each replica full stages, and `fsdp` shards each stage over the replicas (FSDP2).
        **kwargs: arguments of ShardedStateStrategy.

    Raises:
        UserError: if an option does not suit the ranks, the blocks, the micro-batches or the precision.
    """

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
        if data_parallel not in ("ddp", "fsdp"):
            raise UserError(f"strategy.data_parallel={data_parallel}: take ddp or fsdp")
        if not isinstance(microbatches, int) or microbatches < 1:
            raise UserError(f"strategy.microbatches={microbatches}: give a number of at least one")
        self.stages, self.schedule, self.kind = stages, schedule, schedule_spec(schedule)
        self.microbatches, self.split, self.data_parallel = microbatches, split, data_parallel
        self._pipeline: Any = None  # torch's schedule, once the network is split
        self._modules: dict[int, Stage] = {}  # the stages of this rank by their number
        self._outputs: Tensor | None = None  # logits of the current training batch
        self._micro_batches: Batch | None = None  # that batch as (microbatches, n, ...) fields
        self._weights: list[nn.Parameter] = []  # the parameters of this rank's stages
        self._held: list[tuple[nn.Parameter, Tensor]] = []  # gradients of the schedule until `backward`

    @property
    def _accumulate(self) -> int:
        return cast(L.LightningModule, self.lightning_module).trainer.accumulate_grad_batches

    @property
    def _sharded(self) -> bool:
        return self.data_parallel == "fsdp" and self._replicas.size() > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self._replicas.size(), "rank": self._replicas.get_local_rank()}

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches into which the schedule splits a batch."""
        return self.microbatches

    def setup_environment(self) -> None:
        self._setup_distributed()
        ranks = self.stages or self.world_size
        if ranks < 1 or self.world_size % ranks:
            raise UserError(f"strategy.stages={ranks} does not divide the {self.world_size} processes: take a divisor")
        if self.precision_plugin.precision == "16-mixed":
            raise UserError("trainer.precision=16-mixed scales the loss, which a schedule does not: take bf16-mixed")
        shape, names = (self.world_size // ranks, ranks), ("data_parallel", "pipeline")
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self._replicas = self._device_mesh["data_parallel"]  # a look-up takes two milliseconds
        self._group = self._device_mesh["pipeline"].get_group()
        self._place = self._device_mesh["pipeline"].get_local_rank()

    def parallelize(self, module: L.LightningModule) -> None:
        """Keep the blocks of this rank's stages, and replace the forward pass of the network with the pipeline."""
        for norm in module.modules():
            if isinstance(norm, SyncedBatchNorm):
                norm.process_group = self._replicas.get_group()
        self.precision_plugin.clip_grad_by_norm = partial(clip_by_norm_over, self._group)  # type: ignore[method-assign]
        net = cast(nn.Module, module.net)
        if getattr(module, "compiles", False):
            raise UserError("module.compile=true compiles the whole network, of which a pipeline's rank holds a part")
        if self._sharded or self._needs_channels_first(net):  # FSDP supports no other format
            net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        data, ranks = self.lightning_module.trainer.datamodule, self.device_mesh["pipeline"].size()
        images = next(net.parameters()).new_zeros(data.samples_per_micro_batch, *data.image_shape)
        with self.precision_plugin.forward_context():
            blocks = ordered_blocks(net, images)
        self._stage_to_rank = self.kind.stage_to_rank(ranks)
        stages = self._agreed(cut(blocks, len(self._stage_to_rank), self.split), blocks)
        shapes = [images.to("meta"), *(stage[-1].sent for stage in stages)]
        for stage, owner in zip(stages, self._stage_to_rank, strict=True):
            for block in stage if owner != self._place else []:
                net.set_submodule(block.name, nn.Identity())
        own = [number for number, owner in enumerate(self._stage_to_rank) if owner == self._place]
        self._modules = {number: Stage(stages[number], stages[number - 1][-1] if number else None) for number in own}
        if self._sharded:
            for held in self._modules.values():  # gathers once per batch, not per micro-batch
                fully_shard(held, mesh=self._replicas, reshard_after_forward=False)
        parts = [self._stage(number, shapes) for number in own]
        self._pipeline = build_schedule(self.schedule, parts, self.microbatches, self._loss)
        self._relay = StageForward(self._modules, self._stage_to_rank, shapes, self._group, self.root_device)
        self._weights = list(module.parameters())
        net.forward = self._forward
        if self.is_global_zero:
            bubble = self.kind.bubble(ranks, self.microbatches)
            title = f"  pipeline: {self.schedule}, {self.microbatches} micro-batches, ideal bubble {bubble:.0%}"
            _log.info("\n".join([title, *table(stages, self._stage_to_rank)]))

    def _needs_channels_first(self, net: nn.Module) -> bool:
        """Return whether torch's GroupNorm would crash with channels last: docs/upstream/group_norm.md."""
        apart = self.kind.splits_backward and self.root_device.type == "cpu"
        return apart and any(isinstance(part, nn.GroupNorm) for part in net.modules())

    def _agreed(self, stages: list[list[Block]], blocks: list[Block]) -> list[list[Block]]:
        """Return the stages as rank zero cut them, so that all ranks agree."""
        names = self.broadcast([[block.name for block in stage] for stage in stages])
        by_name = {block.name: block for block in blocks}
        return [[by_name[name] for name in stage] for stage in names]

    def _stage(self, stage: int, shapes: Sequence[Tensor]) -> PipelineStage:
        """Build a stage with known shapes; shape inference would update the batch statistics once more."""
        floats = [shape.detach().requires_grad_(place > 0) for place, shape in enumerate(shapes)]
        return PipelineStage(
            self._modules[stage],
            stage,
            len(self._stage_to_rank),
            self.root_device,
            input_args=(floats[stage],),
            output_args=(floats[stage + 1],),
            group=self._group,
        )

    def _loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        """Return the loss of micro-batch `number`, a CPU tensor because the schedule splits a tensor of targets."""
        assert self._micro_batches is not None
        return cast(Any, self.lightning_module).loss(
            outputs, Batch(*(field[int(number)] for field in self._micro_batches))
        )

    def training_step(self, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            self._outputs = self._run_schedule(batch)
        try:
            return super().training_step(batch, *args, **kwargs)
        finally:
            self._outputs = self._micro_batches = None

    def _run_schedule(self, batch: Batch) -> Tensor:
        """Run the schedule on a batch; return its (n, classes) logits on every rank.

        The new gradients are held for `backward`, and the accumulated ones are restored.
        """
        self._micro_batches = Batch(*(field.unflatten(0, (-1, self.microbatches)).transpose(0, 1) for field in batch))
        accumulated = [weight.grad if self._accumulate > 1 else None for weight in self._weights]
        for weight in self._weights:
            weight.grad = None
        for stage in self._modules.values():
            stage.begin(self.microbatches)
        first, last = self._stage_to_rank[0] == self._place, self._stage_to_rank[-1] == self._place
        given = (self._micro_batches.image.flatten(0, 1),) if first else ()
        goal = {"target": torch.arange(self.microbatches), "losses": []} if last else {}
        outputs = self._pipeline.step(*given, **goal)
        self._held = [(weight, weight.grad) for weight in self._weights if weight.grad is not None]
        for weight, gradient in zip(self._weights, accumulated, strict=True):
            weight.grad = gradient
        if last:
            outputs = outputs.detach().unflatten(0, (self.microbatches, -1)).transpose(0, 1).flatten(0, 1)
        return self._relay.to_all(outputs, len(batch.image))

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Add the held gradients to the parameters, averaged over the replicas."""
        module = cast(Any, self.lightning_module)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if not self._sharded:  # FSDP2 has done it; DDP would miss the gradients that bypass its hooks
            average_over(self._replicas.get_group(), [gradient for _, gradient in self._held])
        for weight, gradient in self._held:
            if self._accumulate > 1:
                gradient.div_(self._accumulate)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self._held = []
        return self.precision_plugin.post_backward(closure_loss, module)

    def _forward(self, image: Tensor) -> Tensor:
        """Return the logits of the network: those of the schedule in training, otherwise those of a `StageForward`."""
        return self._relay(image) if self._outputs is None else self._outputs

    @property
    def owns_state(self) -> bool:
        return self._replicas.get_local_rank() == 0

    def gather_state(self, own: Any) -> list[Any]:
        if not self.owns_state:
            return []
        parts: list[Any] | None = [None] * dist.get_world_size(self._group) if self._place == 0 else None
        dist.gather_object(own, parts, group=self._group, group_dst=0)
        return parts or []
