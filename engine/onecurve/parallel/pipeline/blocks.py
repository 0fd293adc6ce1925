"""The forward pass of a network as a graph of its blocks, between which a pipeline can cut it.

torch.distributed.pipelining has a tracer as well. It exports the operations inside the blocks, in training mode only,
and so replaces the modules: dropout, synchronized batch normalization and evaluation would be lost.
"""

import inspect
from collections import ChainMap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from onecurve.errors import UserError
from onecurve.network.module_state import set_mode
from onecurve.network.recomputation import block_names
from onecurve.random.seeding import generator_states

_ADVICE = "make the network an nn.Sequential of its blocks, or use strategy=ddp or fsdp"


@dataclass
class Block:
    """One block of a network, with the operations after it, and its cost for a micro-batch.

    Attributes:
        name: name of the block in the network.
        nodes: its call and the operations up to the next block, in the graph of the network.
        tensors: its parameters, and the running statistics of its normalization, by their name in the network.
        flops: FLOPs of the forward pass.
        outputs: nodes whose values later blocks use; for the last block, the node of the logits.
        can_end_stage: whether these values are activations, with a row for each sample.
    """

    name: str
    nodes: list[fx.Node]
    tensors: dict[str, Tensor]
    flops: int
    outputs: list[fx.Node]
    can_end_stage: bool

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)}

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters.values())


def ordered_blocks(net: nn.Module, images: Tensor) -> list[Block]:
    """Return the blocks of the network in the order of its forward pass, with their cost for a micro-batch of images.

    An `nn.Sequential` of composite modules counts as several blocks, and so does the only child with parameters.
    """
    image, *nodes, _ = _trace(net, list(block_names(net)), images).nodes
    done: dict[fx.Node, None] = {image: None}
    blocks: list[Block] = []
    for group in _group_by_call(nodes):
        done |= dict.fromkeys(node for node in group if node.op != "get_attr")
        used_later = [node for node in done if node.users.keys() - done.keys()]
        called = [str(node.target) for node in group if node.op == "call_module"]
        block = Block(
            name=called[0] if called else "forward",
            nodes=group,
            tensors=_tensors(net, group, called),
            flops=sum(node.meta["flops"] for node in group),
            outputs=used_later,
            can_end_stage=all(node.meta["is_activation"] for node in used_later),
        )
        blocks.append(block)
    return blocks


def _group_by_call(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return groups of consecutive nodes; each but the first begins with the call of a block."""
    groups: list[list[fx.Node]] = [[]]
    for node in nodes:
        if node.op == "call_module" and any(earlier.op == "call_module" for earlier in groups[-1]):
            groups.append([])
        groups[-1].append(node)
    return groups


def _tensors(net: nn.Module, group: Sequence[fx.Node], called: Sequence[str]) -> dict[str, Tensor]:
    """Return the parameters of a group of nodes, and running statistics: of the called modules, and of the network."""
    read = [str(used.target) for node in group for used in node.all_input_nodes if used.op == "get_attr"]
    every: dict[str, Tensor] = dict(net.named_parameters(remove_duplicate=False))
    every |= {name: buffer for name, buffer in net.named_buffers(remove_duplicate=False) if "running_" in name}
    inside = tuple(f"{module}." for module in called)
    return {name: tensor for name, tensor in every.items() if name in read or name.startswith(inside)}


def _trace(net: nn.Module, blocks: Sequence[str], images: Tensor) -> fx.Graph:
    """Return the measured graph of the forward pass: calls of the blocks, and operations between them."""
    if len(inspect.signature(net.forward).parameters) != 1:
        raise UserError(f"a pipeline passes one tensor to the forward pass of `model`: {_ADVICE}")
    with set_mode(net, training=True):
        in_training = str(_record(net, blocks))
    with set_mode(net, training=False):
        graph = _record(net, blocks)
        result = _measure(net, graph, images)
    if str(graph) != in_training:
        raise UserError(
            "the forward pass of `model` is another in training than in evaluation, outside of its blocks: use layers "
            f"such as nn.Dropout instead of functions, or {_ADVICE}"
        )
    if not isinstance(result, Tensor):
        raise UserError(f"the forward pass of `model` must return one tensor for a pipeline: {_ADVICE}")
    return graph


def _record(net: nn.Module, blocks: Sequence[str]) -> fx.Graph:
    """Return the graph of the forward pass, in which the call of a block is one node."""
    tracer: Any = fx.Tracer()
    tracer.is_leaf_module = lambda module, name: name in blocks
    tracer.proxy_buffer_attributes = True  # otherwise a value computed from a buffer would be a constant
    attributes, random_state = set(vars(net)), generator_states()
    try:
        graph = tracer.trace(net)
    except Exception as error:  # the forward pass may do anything with the tracer's objects
        cause = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"the forward pass of `model` cannot be traced ({cause}): {_ADVICE}") from error
    if generator_states() != random_state or set(vars(net)) != attributes:  # the tracer keeps constants in the network
        raise UserError(
            "the forward pass of `model` draws random numbers or creates tensors outside of its blocks: register "
            f"tensors as buffers, or {_ADVICE}"
        )
    return graph


def _measure(net: nn.Module, graph: fx.Graph, images: Tensor) -> Any:
    """Run a graph; each node gets its FLOPs, and a meta tensor like its value.

    `fx.Interpreter.run` would make a progress bar, whose semaphore a process that is killed leaves behind.
    """
    interpreter = fx.Interpreter(net, graph=graph)
    interpreter.args_iter = iter([images])
    for node in graph.nodes:
        with FlopCounterMode(display=False) as counter:
            value = interpreter.env[node] = interpreter.run_node(node)
        node.meta["flops"] = counter.get_total_flops()
        # Other values have no samples, whatever their shape.
        depends = node.op == "placeholder" or any(used.meta["depends"] for used in node.all_input_nodes)
        node.meta["depends"], node.meta["is_activation"] = depends, False
        if isinstance(value, Tensor):
            node.meta["value"] = torch.empty_like(value, device="meta").detach()
            node.meta["is_activation"] = depends and value.is_floating_point() and value.shape[:1] == images.shape[:1]
    return value


def constants(net: nn.Module, blocks: Collection[str]) -> dict[str, Any]:
    """Return the numbers and strings, by name, that the graph of a network has as constants."""
    inside = tuple(f"{name}." for name in blocks)
    return {
        f"{name}.{key}": value
        for name, module in net.named_modules()
        if not f"{name}.".startswith(inside)  # the network, or a module that holds blocks
        # A class may have the default of a number.
        for key, value in ChainMap(vars(module), *(dict(vars(cls)) for cls in type(module).__mro__)).items()
        if isinstance(value, int | float | str) and key != "training"
    }
