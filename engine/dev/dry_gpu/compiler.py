"""A stub of torch.compile's Inductor, which would need Triton: it counts what it gets, and runs it as it is."""

from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

from engine.dev.dry_gpu.synchronizations import SYNCHRONIZATIONS

_graphs: list[int] = []  # operations of each graph
_running: list[fx.GraphModule] = []  # compiled graphs that are being executed


def install_compiler() -> None:
    """Replace the default backend of torch.compile, for functions that are already decorated as well."""
    module: Any = torch
    module._TorchCompileInductorWrapper.__call__ = _count
    # The division of a graph at the buckets of DistributedDataParallel mixes up modes of fake tensors.
    config: Any = torch._dynamo.config
    config.optimize_ddp = False


def is_in_compiled_graph() -> bool:
    """Return whether the present operation belongs to a graph that Inductor would have compiled."""
    return bool(_running)


def describe_graphs() -> str:
    """Return the number of captured operations, graphs and graph breaks; an empty text if nothing was compiled."""
    if not _graphs:
        return ""
    return f"{sum(_graphs)} in {len(_graphs)}, {sum(counters['graph_break'].values())} breaks"


def _count(self: Any, graph: fx.GraphModule, inputs: Any) -> Any:
    _graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
    # As Inductor does, each graph updates its inputs, such as running statistics, itself.
    backend = aot_autograd(fw_compiler=_compile, bw_compiler=_compile, keep_inference_input_mutations=True)
    return backend(graph, inputs)


def _compile(graph: fx.GraphModule, inputs: Any) -> Any:
    """Return a function that executes a graph of the forward or the backward pass."""

    def run(*args: Any) -> Any:
        _running.append(graph)
        try:
            return _Interpreter(graph).run(*args)
        finally:
            _running.pop()

    return make_boxed_func(run)


class _Interpreter(fx.Interpreter):
    """Executes a graph; what depends on constants alone is no synchronization, since Inductor computes it in advance.

    torch/_inductor/ir.py, DeviceCopy.create.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.constants: set[fx.Node] = set()
        for node in graph.graph.nodes:
            sources = node.all_input_nodes
            if node.op == "get_attr" or (sources and self.constants.issuperset(sources)):
                self.constants.add(node)

    def run_node(self, n: fx.Node) -> Any:
        enabled = SYNCHRONIZATIONS.enabled
        SYNCHRONIZATIONS.enabled = enabled and n not in self.constants
        try:
            return super().run_node(n)
        finally:
            SYNCHRONIZATIONS.enabled = enabled
