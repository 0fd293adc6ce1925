"""The blocks of a network, between which a pipeline can cut it, with their cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from src.engine.determinism.recomputation import block_names
from src.engine.parallel.pipeline.graph import trace


@dataclass
class Block:
    """One block of a network, with the operations after it, and its cost for a micro-batch.

    Attributes:
        name: name of the block in the network.
        nodes: its call and the operations up to the next block, in the graph of the network.
        tensors: its parameters, and the running statistics of its normalization, by their name in the network.
        flops: FLOPs of the forward pass.
        outputs: nodes whose values later blocks use; for the last block, the node of the logits.
        bytes_sent: bytes of these values; infinite if one of them is no activation, so that no stage can end here.
    """

    name: str
    nodes: list[fx.Node]
    tensors: dict[str, Tensor]
    flops: int
    outputs: list[fx.Node]
    bytes_sent: float

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)}

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters.values())


def ordered_blocks(net: nn.Module, images: Tensor) -> list[Block]:
    """Return the blocks of the network in the order of its forward pass, with their cost for a micro-batch.

    An `nn.Sequential` of composite modules counts as several blocks, and so does the only child with parameters.

    Args:
        net: network with its blocks as children.
        images: (n, channels, height, width) micro-batch of random images.

    Raises:
        UserError: if the forward pass is no graph of calls of the blocks.
    """
    graph = trace(net, list(block_names(net)), images)
    image, *nodes, result = graph.nodes
    groups = _group_by_call(nodes)
    activations = _depending_on(image, nodes)
    blocks: list[Block] = []
    for number, group in enumerate(groups):
        earlier = [image, *(node for before in groups[: number + 1] for node in before if node.op != "get_attr")]
        later = {node for after in groups[number + 1 :] for node in after}
        outputs = [node for node in earlier if later & node.users.keys()] if later else result.all_input_nodes
        flops = sum(node.meta["flops"] for node in group)
        sent = _bytes_sent(outputs, len(images)) if activations.issuperset(outputs) else math.inf
        blocks.append(Block(_unique_name(group, blocks), group, _tensors(net, group), flops, outputs, sent))
    return blocks


def _depending_on(image: fx.Node, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose values depend on the images; others have no samples, whatever their shape."""
    found = {image}
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _group_by_call(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return groups of consecutive nodes; each but the first begins with the call of a block."""
    groups: list[list[fx.Node]] = [[]]
    for node in nodes:
        if node.op == "call_module" and any(earlier.op == "call_module" for earlier in groups[-1]):
            groups.append([])
        groups[-1].append(node)
    return groups


def _bytes_sent(outputs: Sequence[fx.Node], samples: int) -> float:
    total = 0
    for node in outputs:
        value = node.meta["value"]
        if value is None or not value.is_floating_point() or value.shape[:1] != (samples,):
            return math.inf
        total += value.nbytes
    return total


def _unique_name(group: Sequence[fx.Node], blocks: Sequence[Block]) -> str:
    """Return the name of the module that a group calls; a later call of the same module has a number."""
    called = next((str(node.target) for node in group if node.op == "call_module"), "forward")
    calls = 1 + sum(block.name.partition("#")[0] == called for block in blocks)
    return f"{called}#{calls}" if calls > 1 else called


def _tensors(net: nn.Module, group: Sequence[fx.Node]) -> dict[str, Tensor]:
    """Return the parameters of a group of nodes, and running statistics: of the called modules, and of the network."""
    called = [str(node.target) for node in group if node.op == "call_module"]
    read = [str(used.target) for node in group for used in node.all_input_nodes if used.op == "get_attr"]
    every: dict[str, Tensor] = dict(net.named_parameters(remove_duplicate=False))
    for name, module in net.named_modules(remove_duplicate=False):
        if isinstance(module, _NormBase):
            every |= {f"{name}.{buffer}": tensor for buffer, tensor in module.named_buffers()}
    return {
        name: tensor
        for name, tensor in every.items()
        if name in read or any(name.startswith(f"{module}.") for module in called)
    }
