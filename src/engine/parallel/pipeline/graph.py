"""The forward pass of a network as a graph of its blocks, which a pipeline cuts into stages.

torch.distributed.pipelining has a tracer as well. It exports the operations inside the blocks, in training mode only,
and so replaces the modules: dropout, synchronized batch normalization and evaluation would be lost.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from src.engine.determinism.samples import generator_states
from src.engine.utils.errors import UserError

_ADVICE = "make the network an nn.Sequential of its blocks, or use strategy=ddp or fsdp"


class _BlockTracer(fx.Tracer):
    """Tracer that records a call of a block as one node."""

    proxy_buffer_attributes = True  # otherwise a value computed from a buffer would be a constant

    def __init__(self, blocks: Sequence[str]) -> None:
        super().__init__()
        self.blocks = blocks

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.blocks


def trace(net: nn.Module, blocks: Sequence[str], images: Tensor) -> fx.Graph:
    """Return the measured graph of the forward pass: calls of the blocks, and operations between them.

    Args:
        net: network.
        blocks: names of its blocks.
        images: (n, channels, height, width) images, random ones: with zeros a ReLU would make no difference.

    Raises:
        UserError: if the forward pass cannot be traced, takes more than the images, is different in training, draws
            random numbers or creates tensors outside of the blocks, or the graph computes something else.
    """
    if len(inspect.signature(net.forward).parameters) != 1:
        raise UserError(f"a pipeline passes one tensor to the forward pass of `model`: {_ADVICE}")
    with set_mode(net, training=True):
        in_training = str(_record(net, blocks))
    with set_mode(net, training=False):
        graph = _record(net, blocks)
        expected, found = net(images), _measure(net, graph, images)
    if str(graph) != in_training:
        raise UserError(
            "the forward pass of `model` is another in training than in evaluation, outside of its blocks: use layers "
            f"such as nn.Dropout instead of functions, or {_ADVICE}"
        )
    if not (isinstance(expected, Tensor) and torch.allclose(found, expected, rtol=1e-3, atol=1e-5)):
        raise UserError(f"the blocks of `model` do not compose its forward pass: {_ADVICE}")
    return graph


def _measure(net: nn.Module, graph: fx.Graph, images: Tensor) -> Any:
    """Run a graph; each node gets its FLOPs and, if its value is a tensor, a meta tensor like it.

    `fx.Interpreter.run` would make a progress bar, whose semaphore a process that is killed leaves behind.
    """
    interpreter = fx.Interpreter(net, graph=graph)
    interpreter.args_iter = iter([images])
    for node in graph.nodes:
        with FlopCounterMode(display=False) as counter:
            value = interpreter.env[node] = interpreter.run_node(node)
        node.meta["flops"] = counter.get_total_flops()
        node.meta["value"] = torch.empty_like(value, device="meta").detach() if isinstance(value, Tensor) else None
    return value


def extract(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.Graph:
    """Return the graph of some consecutive nodes.

    Args:
        nodes: the nodes, in order.
        inputs: earlier nodes, whose values are the arguments.
        outputs: nodes whose values are returned, a tuple if there are several. An input among them is copied, because
            a schedule detaches what a stage returns in place.
    """
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copy)  # and, before it, a parameter of the network itself
        return copies[node]

    for node in nodes:
        if node.op != "get_attr":
            copy(node)
    results = [graph.call_method("clone", (copies[node],)) if node in inputs else copies[node] for node in outputs]
    graph.output(tuple(results) if len(results) > 1 else results[0])
    return graph


def modules_around(net: nn.Module, blocks: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules by name whose forward pass the graph replaces: the network and all that hold blocks."""
    inside = tuple(f"{name}." for name in blocks)
    return {name: part for name, part in net.named_modules() if not f"{name}.".startswith(inside)}


def constants(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the numbers and strings of modules, by name, which are constants in a graph."""
    found: dict[str, Any] = {}
    for name, part in modules.items():
        for owner in (*reversed(type(part).__mro__), part):  # a class may have the default of an attribute
            values = {key: value for key, value in vars(owner).items() if isinstance(value, int | float | str)}
            found |= {f"{name}.{key}": value for key, value in values.items() if key != "training"}
    return found


def _record(net: nn.Module, blocks: Sequence[str]) -> fx.Graph:
    attributes, random_state = set(vars(net)), generator_states()
    try:
        graph = _BlockTracer(blocks).trace(net)
    except Exception as error:  # the forward pass may do anything with the tracer's objects
        cause = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"the forward pass of `model` cannot be traced ({cause}): {_ADVICE}") from error
    if generator_states() != random_state:
        raise UserError(f"the forward pass of `model` draws random numbers outside of its blocks: {_ADVICE}")
    if set(vars(net)) != attributes:  # the tracer keeps constants in the network
        raise UserError(
            f"the forward pass of `model` creates tensors outside of its blocks: register them as buffers, or {_ADVICE}"
        )
    return graph


@contextmanager
def set_mode(net: nn.Module, training: bool) -> Iterator[None]:
    """Set the mode of all modules, and restore each module's own mode."""
    before = {module: module.training for module in net.modules()}
    net.train(training)
    try:
        yield
    finally:
        for module, was_training in before.items():
            module.training = was_training
