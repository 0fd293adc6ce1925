"""A pipeline stage as a module: consecutive blocks, with the memory formats and random numbers of their micro-batches.

Sample i of a batch belongs to micro-batch i % microbatches (`src/engine/determinism/sampler.py`).
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage

from src.engine.determinism.dropout import dropouts, set_keys
from src.engine.determinism.random_functions import sample_random
from src.engine.observe.recording import pipeline_pass
from src.engine.parallel.pipeline.blocks import Block
from src.engine.parallel.pipeline.graph import extract


def split_samples(values: Tensor, microbatches: int) -> Tensor:
    """Return the (samples, ...) values of a batch as a (microbatches, n, ...) view."""
    return values.unflatten(0, (-1, microbatches)).transpose(0, 1)


def join_samples(values: Tensor) -> Tensor:
    """Undo `split_samples`: return (microbatches, n, ...) values in the order of the batch, (samples, ...)."""
    return values.transpose(0, 1).flatten(0, 1)


class Stage(nn.Module):
    """Consecutive blocks whose inputs and outputs are sent in their memory format, without a copy.

    Args:
        net: the full network.
        blocks: the blocks in order.
        inputs: nodes whose values are the inputs of the stage.
    """

    def __init__(self, net: nn.Module, blocks: Sequence[Block], inputs: Sequence[fx.Node]) -> None:
        super().__init__()
        nodes, outputs = [node for block in blocks for node in block.nodes], blocks[-1].outputs
        self.body = fx.GraphModule(net, extract(nodes, inputs, outputs))
        self.calls_before = 0  # calls of random functions in the stages before it
        self._dropouts = dropouts(self)
        self._keys: Tensor | None = None
        self._seed = 0
        self._input_permuted = [is_permuted(node) for node in inputs]
        self._output_permuted = [is_permuted(node) for node in outputs]

    def begin(self, keys: Tensor, seed: int) -> None:
        """Prepare for a batch: the (micro-batches, n) keys of its samples, and the seed of torch's generator."""
        self._keys, self._seed = keys, seed

    def begin_micro_batch(self, number: int) -> None:
        """Draw random numbers for the samples of a micro-batch; in its backward pass, a block may be computed again."""
        if self._keys is None:
            return
        sample_random.begin_micro_batch(self._keys[number], self._seed + self.calls_before)
        if self._dropouts:
            set_keys(self._dropouts, self._keys[number])

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        received = zip(inputs, self._input_permuted, strict=True)
        results = self.body(*(_Received.apply(x, permuted) for x, permuted in received))
        sent = zip(results if isinstance(results, tuple) else (results,), self._output_permuted, strict=True)
        outputs = tuple(_Sent.apply(x, permuted) for x, permuted in sent)
        return outputs if len(outputs) > 1 else outputs[0]


def is_permuted(node: fx.Node) -> bool:
    """Return whether a value is sent as (n, height, width, channels): what is sent must be contiguous.

    That is so for a value in channels last. The images come from the data, not from another stage.
    """
    value: Tensor = node.meta["value"]
    if node.op == "placeholder" or value.is_contiguous():
        return False
    return value.is_contiguous(memory_format=torch.channels_last)


def remove_other_stages(net: nn.Module, stages: Sequence[Sequence[Block]], own: Container[int]) -> None:
    """Remove the blocks and the parameters of the stages of other ranks from the network, in place.

    Args:
        net: the full network.
        stages: the blocks of each stage.
        own: the numbers of the stages of this rank.
    """
    kept = [block for number, blocks in enumerate(stages) if number in own for block in blocks]
    others = [block for number, blocks in enumerate(stages) if number not in own for block in blocks]
    for name in called_modules([others]) - called_modules([kept]):
        net.set_submodule(name, nn.Identity())
    remaining = {name for name, _ in net.named_parameters()}
    for name in remaining & {name for block in others for name in block.parameters}:
        module, _, parameter = name.rpartition(".")
        delattr(net.get_submodule(module), parameter)


def shard_stage(net: nn.Module, stage: Stage, mesh: DeviceMesh) -> None:
    """Shard a stage over the ranks of a mesh, and let the network have its parameters in place of its own."""
    fully_shard(stage, mesh=mesh, reshard_after_forward=False)  # gathers once per batch, not per micro-batch
    for name, parameter in stage.body.named_parameters():
        module, _, last = name.rpartition(".")
        setattr(net.get_submodule(module), last, parameter)


def stage_inputs(stages: Sequence[Sequence[Block]], number: int) -> list[fx.Node]:
    """Return the nodes whose values are the inputs of a stage: the images, or the outputs of the stage before."""
    if number:
        return stages[number - 1][-1].outputs
    return [next(iter(stages[0][0].nodes[0].graph.nodes))]


def stage_shapes(stages: Sequence[Sequence[Block]]) -> list[list[Tensor]]:
    """Return meta tensors like the inputs of each stage, and the output of the last, as they are sent."""
    sent = [stage_inputs(stages, 0), *(blocks[-1].outputs for blocks in stages)]
    return [[_sent_like(node) for node in nodes] for nodes in sent]


def _sent_like(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["value"]
    return value.permute(0, 2, 3, 1) if is_permuted(node) else value.contiguous()


def called_modules(stages: Iterable[Iterable[Block]]) -> set[str]:
    """Return the names of the modules that the graphs of some stages call."""
    nodes = [node for blocks in stages for block in blocks for node in block.nodes]
    return {str(node.target) for node in nodes if node.op == "call_module"}


def build_stage(
    stage: Stage, number: int, shapes: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None, device: torch.device
) -> PipelineStage:
    """Build torch's stage with known shapes; shape inference would update the batch statistics once more.

    Args:
        stage: the stage as a module.
        number: its number.
        shapes: meta tensors like the inputs of each stage, and the output of the last.
        group: ranks of the pipeline.
        device: device of this rank.
    """
    received = tuple(like.detach().requires_grad_(number > 0) for like in shapes[number])  # images need no gradient
    sent = tuple(like.detach().requires_grad_() for like in shapes[number + 1])
    return RecordedStage(stage, number, len(shapes) - 1, device, input_args=received, output_args=sent, group=group)


class RecordedStage(PipelineStage):
    """torch's stage, whose passes draw the random numbers of their micro-batch, and are recorded by the timeline."""

    submod: Any

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.begin_micro_batch(fwd_chunk_id)
        with pipeline_pass(self.stage_index, fwd_chunk_id, "F"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.submod.begin_micro_batch(bwd_chunk_id)
        with pipeline_pass(self.stage_index, bwd_chunk_id, "B" if full_backward else "I"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward=full_backward, last_backward=last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with pipeline_pass(self.stage_index, bwd_chunk_id, "W"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)


class _Received(torch.autograd.Function):
    """Map what a stage receives to its input: from (n, height, width, channels) to channels last, without a copy.

    The result is no view of a leaf, so that a block may change it in place. Only contiguous gradients can be sent.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor, permuted: bool) -> Tensor:
        ctx.permuted = permuted
        return received.permute(0, 3, 1, 2).detach() if permuted else received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient.permute(0, 2, 3, 1) if ctx.permuted else gradient).contiguous(), None


class _Sent(torch.autograd.Function):
    """Map the output of a stage to what it sends: from channels last to (n, height, width, channels), without a copy.

    The result is not a view for autograd. Schedules detach the output of a stage in place, which fails for a view
    (`stage_backward_input` in torch/distributed/pipelining/_backward.py).
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, permuted: bool) -> Tensor:
        ctx.permuted = permuted
        return (output.permute(0, 2, 3, 1) if permuted else output).contiguous().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.permute(0, 3, 1, 2) if ctx.permuted else gradient, None


class StageForward:
    """The forward pass of a network whose stages are on the ranks of a group. Every rank must call it.

    Args:
        stages: the stages of this rank by their number.
        stage_to_rank: rank of each stage in the group.
        shapes: meta tensors with shape and type of the inputs of each stage, and of the output of the last. Their batch
            size has no meaning.
        group: ranks of the pipeline.
        device: device of this rank.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        stage_to_rank: Sequence[int],
        shapes: Sequence[Sequence[Tensor]],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.stages, self.stage_to_rank, self.shapes = stages, stage_to_rank, shapes
        self.group, self.device = group, device

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map the inputs of n samples to the (n, ...) outputs of the network, on every rank."""
        values: tuple[Tensor, ...] = (inputs,)
        last = len(self.stage_to_rank) - 1
        for number, stage in self.stages.items():
            own_rank = self.stage_to_rank[number]
            if number > 0 and self.stage_to_rank[number - 1] != own_rank:
                values = self._empty(number, len(inputs))
                for value in values:
                    dist.recv(value, group=self.group, group_src=self.stage_to_rank[number - 1])
            result = self._run(stage, values)
            values = result if isinstance(result, tuple) else (result,)
            if isinstance(stage, FSDPModule):
                stage.reshard()
            if number < last and self.stage_to_rank[number + 1] != own_rank:
                for value in values:
                    dist.send(value, group=self.group, group_dst=self.stage_to_rank[number + 1])
        return self.to_all(values[0] if last in self.stages else None, len(inputs))

    @staticmethod
    def _run(stage: nn.Module, values: tuple[Tensor, ...]) -> Any:
        calls = sample_random.calls
        result = stage(*values)
        if sample_random.calls > calls:  # the stages before it have not drawn theirs on this rank
            raise sample_random.refusal("the evaluation of a pipeline's stage")
        return result

    def to_all(self, outputs: Tensor | None, count: int) -> Tensor:
        """Broadcast the (count, ...) outputs of the last stage; other ranks pass None."""
        outputs = self._empty(-1, count)[0] if outputs is None else outputs.contiguous()
        dist.broadcast(outputs, group=self.group, group_src=self.stage_to_rank[-1])
        return outputs

    def _empty(self, number: int, count: int) -> tuple[Tensor, ...]:
        """Return empty tensors for the inputs of stage `number`, with `count` samples; -1 means the outputs."""
        return tuple(
            torch.empty(count, *like.shape[1:], dtype=like.dtype, device=self.device) for like in self.shapes[number]
        )
