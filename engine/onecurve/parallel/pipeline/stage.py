"""A pipeline stage as a module: consecutive blocks, with the memory formats and random numbers of their micro-batches.

Sample i of a batch belongs to micro-batch i % microbatches (`onecurve/data/layout.py`).
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.optim import Optimizer

from onecurve.data.batch import are_lists_of_samples
from onecurve.errors import UserError
from onecurve.network.tensors import memory_format_of
from onecurve.observe.step_times import pipeline_pass
from onecurve.parallel.pipeline.blocks import Block
from onecurve.parallel.sharded_state import prepare_to_shard
from onecurve.parallel.virtual_ranks import PassSums
from onecurve.patches.torch import tree_leaves, tree_map
from onecurve.random.dropout import dropouts, set_keys
from onecurve.random.random_functions import sample_random


def split_samples(values: Tensor, microbatches: int) -> Tensor:
    """Return the (samples, ...) values of a batch as a (microbatches, n, ...) view."""
    return values.unflatten(0, (-1, microbatches)).transpose(0, 1)


def join_samples(values: Tensor, microbatches: int) -> Tensor:
    """Return the (samples, ...) values of one micro-batch after the other in the order of the batch."""
    return values.unflatten(0, (microbatches, -1)).transpose(0, 1).flatten(0, 1)


def micro_batch(batch: Any, number: int, microbatches: int) -> Any:
    """Return one micro-batch of a batch, which is divided by the rows of its tensors, and lists by their items."""
    leaves = tree_leaves(batch)
    shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
    is_whole = any(map(is_dataclass, leaves)) and microbatches > 1  # its tensors would be those of the batch
    if is_whole or (microbatches > 1 and not shapes) or any(not shape or shape[0] % microbatches for shape in shapes):
        found = "is a dataclass" if is_whole else f"has tensors of the shapes {shapes[:4]}"
        raise UserError(
            f"strategy=pipeline divides a batch into {microbatches} micro-batches by the rows of its tensors, and a "
            f"batch of this loader {found}: let collate_fn return tuples or dictionaries of tensors that have a row "
            "per sample, or use strategy=ddp or fsdp"
        )
    samples = shapes[0][0] if shapes else None

    def part(values: Any) -> Any:
        if isinstance(values, Tensor):
            return split_samples(values, microbatches)[number]
        return values[number::microbatches] if isinstance(values, list | tuple) else values

    return tree_map(part, batch, is_leaf=lambda values: are_lists_of_samples([values], [samples]))


def check_shape(inputs: Tensor, expected: Tensor, is_trained: bool) -> None:
    """Raise a UserError for other inputs of the network than those for which it was cut; an evaluation has any number.

    The stages receive what they train in buffers of one size.
    """
    first, unit = (0, "micro-batches") if is_trained else (1, "samples")
    if inputs.shape[first:] != expected.shape[first:]:
        raise UserError(
            f"strategy=pipeline: the network was cut for {unit} of shape {list(expected.shape[first:])}, and gets "
            f"{list(inputs.shape[first:])}: pad all samples to one shape, and take batches of one size, or use "
            "strategy=ddp or fsdp"
        )


class Stage(nn.Module):
    """Consecutive blocks, whose outputs are contiguous, since no others can be sent.

    Attributes:
        calls: calls of random functions in the last forward pass.
        calls_before: such calls in the stages before it.
        keys: (micro-batches, n) keys of the samples of the batch; None if no random number is drawn.
        seed: seed of torch's generator before the batch.
        pass_sums: gets the gradients and buffers of each micro-batch, if it is a virtual rank.
    """

    keys: Tensor | None
    seed: int

    def __init__(self, net: nn.Module, blocks: Sequence[Block], inputs: Sequence[fx.Node]) -> None:
        super().__init__()
        nodes, outputs = [node for block in blocks for node in block.nodes], blocks[-1].outputs
        self.body = fx.GraphModule(net, extract_graph(nodes, inputs, outputs))
        self.calls, self.calls_before = 0, 0
        self._dropouts = dropouts(self)
        self.pass_sums: PassSums | None = None
        # Of each value as it left the last stage's layers: channels last is lost when it is sent.
        self._formats = [memory_format_of(node.meta["value"]) for node in inputs]

    def end_backward(self, number: int) -> None:
        """End the backward pass of a micro-batch, when it has the gradients of the weights."""
        if self.pass_sums:
            self.pass_sums.add_gradients(number)

    def begin_micro_batch(self, number: int) -> None:
        """Draw random numbers for the samples of a micro-batch; in its backward pass, a block may be computed again."""
        if self.keys is None:
            return
        sample_random.begin_micro_batch(self.keys[number], self.seed + self.calls_before)
        if self._dropouts:
            set_keys(self._dropouts, self.keys[number])

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        before = sample_random.calls
        results = self.body(*(_Transit.apply(x, form) for x, form in zip(inputs, self._formats, strict=True)))
        self.calls = sample_random.calls - before
        return tuple(_Transit.apply(result, torch.contiguous_format) for result in results)


def extract_graph(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.Graph:
    """Return the graph of some consecutive nodes, from the values of earlier nodes to those of `outputs`."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copy)  # and, before it, a parameter of the network itself
        return copies[node]

    def returned(node: fx.Node) -> fx.Node:
        # An input is cloned, because a schedule detaches in place what a stage returns.
        return graph.call_method("clone", (copies[node],)) if node in inputs else copies[node]

    for node in nodes:
        if node.op != "get_attr":
            copy(node)
    graph.output(tuple(map(returned, outputs)))
    return graph


class _Transit(torch.autograd.Function):
    """Change the memory format of what a stage receives or sends; the gradient gets the format from before.

    Layers are slow if a gradient has another format than their activations.
    The result is no view for autograd. A block may change a received value in place, and schedules detach the output of
    a stage in place, which fails for a view (`stage_backward_input` in torch/distributed/pipelining/_backward.py).
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, memory_format: torch.memory_format) -> Tensor:
        ctx.memory_format = memory_format_of(value)
        return value.contiguous(memory_format=memory_format).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.contiguous(memory_format=ctx.memory_format), None


def remove_other_stages(net: nn.Module, stages: Sequence[Sequence[Block]], own: Container[int]) -> None:
    """Remove the blocks and the parameters of all stages but the `own` ones from the network, in place."""
    kept = [block for number, blocks in enumerate(stages) if number in own for block in blocks]
    others = [block for number, blocks in enumerate(stages) if number not in own for block in blocks]
    # A module or a parameter may have several names.
    own_modules = {net.get_submodule(name) for name in called_modules(kept)}
    removed = {net.get_submodule(name) for name in called_modules(others)} - own_modules
    own_parameters = {parameter for block in kept for parameter in block.parameters.values()}
    of_others = {parameter for block in others for parameter in block.parameters.values()} - own_parameters
    parents = list(net.modules())
    for path, module in reversed(list(net.named_modules(remove_duplicate=False))):  # from the inside out
        if module in removed:
            net.set_submodule(path, nn.Identity())
    for parent in parents:
        for name, parameter in list(parent.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in of_others:
                delattr(parent, name)


def keep_parameters(optimizer: Optimizer, own: Container[Tensor]) -> None:
    """Remove from an optimizer all parameters but the `own` ones, in place."""
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in own]
    for parameter in [one for one in optimizer.state if one not in own]:  # Adagrad's
        del optimizer.state[parameter]


def called_modules(blocks: Iterable[Block]) -> set[str]:
    """Return the names of the modules that the graph of some blocks calls."""
    return {str(node.target) for block in blocks for node in block.nodes if node.op == "call_module"}


def shard_stage(net: nn.Module, stage: Stage, mesh: DeviceMesh) -> None:
    """Shard a stage over the ranks of a mesh, and let the network have its parameters in place of its own."""
    prepare_to_shard(stage)
    fully_shard(stage, mesh=mesh, reshard_after_forward=False)  # gathers once per batch, not per micro-batch
    for name, parameter in stage.body.named_parameters():
        module, _, last = name.rpartition(".")
        setattr(net.get_submodule(module), last, parameter)


def stage_inputs(stages: Sequence[Sequence[Block]], number: int) -> list[fx.Node]:
    """Return the nodes whose values are the inputs of a stage: the images, or the outputs of the stage before."""
    if number:
        return stages[number - 1][-1].outputs
    return [next(iter(stages[0][0].nodes[0].graph.nodes))]


def values_sent(stages: Sequence[Sequence[Block]]) -> list[list[Tensor]]:
    """Return meta tensors like the inputs of the first stage, and the outputs of each stage, as they are sent."""
    sent = [stage_inputs(stages, 0), *(blocks[-1].outputs for blocks in stages)]
    return [[node.meta["value"].contiguous() for node in nodes] for nodes in sent]


def build_stages(
    stages: Mapping[int, Stage], values: Sequence[Sequence[Tensor]], group: dist.ProcessGroup, device: torch.device
) -> list[PipelineStage]:
    """Build torch's stages with the known `values_sent`; inference would update the batch statistics once more."""
    built: list[PipelineStage] = []
    for number, stage in stages.items():
        received = tuple(like.detach().requires_grad_(number > 0) for like in values[number])  # images need no gradient
        sent = tuple(like.detach().requires_grad_() for like in values[number + 1])
        built.append(
            RecordedStage(stage, number, len(values) - 1, device, input_args=received, output_args=sent, group=group)
        )
    return built


class RecordedStage(PipelineStage):
    """torch's stage, whose passes draw the random numbers of their micro-batch, and are recorded by the timeline."""

    submod: Any

    def forward_one_chunk(self, fwd_chunk_id: int, args: tuple[Tensor, ...], *others: Any, **kwargs: Any) -> Any:
        # The first stage gets views of the batch, for autograd all changed if a layer changes one of them in place.
        args = tuple(arg.data for arg in args)
        self.submod.begin_micro_batch(fwd_chunk_id)
        sums = self.submod.pass_sums
        if sums:
            sums.copy_buffers()
        with pipeline_pass(self.stage_index, fwd_chunk_id, "F"):
            output = super().forward_one_chunk(fwd_chunk_id, args, *others, **kwargs)
        if sums:
            sums.add_buffers(fwd_chunk_id)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.submod.begin_micro_batch(bwd_chunk_id)
        with pipeline_pass(self.stage_index, bwd_chunk_id, "B" if full_backward else "I"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward=full_backward, last_backward=last_backward)
        if full_backward:
            self.submod.end_backward(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with pipeline_pass(self.stage_index, bwd_chunk_id, "W"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self.submod.end_backward(bwd_chunk_id)
