"""Recording of the time that FSDP2 takes to gather weights and to reduce gradients, for `callbacks.timeline`.

torch gathers the weights of a block in a hook before its forward pass and in a hook before its backward pass, and
reduces its gradients in an autograd node behind its inputs. Here a hook runs before and a hook after each of the three.
On a GPU the hooks measure for how long the computation waits, not the communication that overlaps with it.
"""

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from src.utils.timeline import COMMUNICATION, current_recording


def record_communication(module: nn.Module) -> None:
    """Add the hooks to a module, after `fully_shard` has added its own."""
    module.register_forward_pre_hook(_before_gather, prepend=True)
    module.register_forward_pre_hook(_after_gather)
    module.register_forward_hook(_before_backward_gather, prepend=True)
    module.register_forward_hook(_after_backward_gather)


def _before_gather(module: nn.Module, inputs: Any) -> None:
    _begin()


def _after_gather(module: nn.Module, inputs: Any) -> None:
    """The inputs now come from the autograd node that reduces the gradients after the backward pass of the module."""
    _end()
    if current_recording():
        nodes = [value.grad_fn for value in tree_leaves(inputs) if isinstance(value, Tensor) and value.grad_fn]
        for node in nodes[:1]:  # it is the node of all inputs
            node.register_prehook(_begin)
            node.register_hook(_end)


def _before_backward_gather(module: nn.Module, inputs: Any, outputs: Any) -> None:
    if current_recording() and isinstance(outputs, Tensor) and outputs.requires_grad:
        outputs.register_hook(_begin)


def _after_backward_gather(module: nn.Module, inputs: Any, outputs: Any) -> None:
    if current_recording() and isinstance(outputs, Tensor) and outputs.requires_grad:
        outputs.register_hook(_end)


def _begin(*_: Any) -> None:
    if recording := current_recording():
        recording.begin(COMMUNICATION)


def _end(*_: Any) -> None:
    if recording := current_recording():
        recording.end()
