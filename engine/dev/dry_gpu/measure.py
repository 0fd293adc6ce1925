"""Count the operations of a training step by phase, and record its synchronizations."""

from collections import Counter
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.dev.dry_gpu.collectives import describe_call
from engine.dev.dry_gpu.compiler import is_in_compiled_graph
from engine.dev.dry_gpu.synchronizations import SYNCHRONIZATIONS
from onecurve.observe.steps import is_log_point

PHASES = ["data", "forward and loss", "backward", "optimizer", "callbacks"]
# These allocate or describe tensors, and launch nothing. (Views have a property of their own.)
_NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "resize_", "set_"}
_NO_LAUNCH |= {"_unsafe_view", "_reshape_alias", "record_stream", "detach_", "is_same_size", "device"}


class StepCounter(L.Callback):
    """Counts the operations and collectives of the last step between two log points.

    The phases are `PHASES`. A pipeline runs its backward passes in `training_step`, and a GAN has one phase of forward,
    backward and optimizer for both networks.
    """

    def __init__(self) -> None:
        self.phase = PHASES[0]
        self.operations: dict[str, Counter[str]] = {}
        self.collectives: Counter[str] = Counter()
        self.steps = 0  # steps between two log points
        self.at_log_point: dict[str, int] = {}  # synchronizations of the last step with a log point

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        loop.advance = partial(self._watch, trainer, loop.advance)
        register_optimizer_step_post_hook(partial(self._after_optimizer, trainer))

    def _watch(self, trainer: L.Trainer, advance: Any, data_fetcher: Any) -> None:
        """Take a batch through the loop, and count its operations if no log point belongs to it."""
        if is_log_point(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped + 1):
            with SYNCHRONIZATIONS.apart() as self.at_log_point, _Operations(StepCounter()):
                advance(data_fetcher)
            return
        self.phase, self.operations, self.collectives = PHASES[0], {}, Counter()
        self.steps += 1
        SYNCHRONIZATIONS.enabled = True
        try:
            with _Operations(self):
                advance(data_fetcher)
        finally:
            SYNCHRONIZATIONS.enabled = False

    def on_train_batch_start(self, *_: Any) -> None:
        self.phase = "forward and loss"

    def on_before_backward(self, *_: Any) -> None:
        self.phase = "backward"

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.phase = "optimizer"

    def _after_optimizer(self, trainer: L.Trainer, optimizer: Any, *_: Any) -> None:
        if optimizer in trainer.optimizers:  # not the one within ZeroRedundancyOptimizer
            self.phase = "callbacks"


class _Operations(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, counter: StepCounter) -> None:
        super().__init__()
        self.counter = counter

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise compiled functions would run uncompiled within this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return result
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional"):
            if name != "wait_tensor":  # the second half of a collective that is compiled
                self.counter.collectives[describe_call(func, args)] += 1
        elif _uses_cuda(args, kwargs, result) and not func.is_view and name not in _NO_LAUNCH:
            if not is_in_compiled_graph():
                self.counter.operations.setdefault(self.counter.phase, Counter())[name] += 1
            if wait := _blocking_copy(name, args, kwargs, result) or _masked_assignment(name, args):
                SYNCHRONIZATIONS.report(wait)
        return result


def _uses_cuda(*values: Any) -> bool:
    return any(isinstance(value, Tensor) and value.device.type == "cuda" for value in tree_leaves(values))


def _blocking_copy(name: str, args: Any, kwargs: Any, result: Any) -> str | None:
    """Describe the copy between host and device for which the host waits, if the operation is one."""
    if name not in ("_to_copy", "copy_") or kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)):
        return None
    source: torch.device = args[name == "copy_"].device
    return f"blocking copy from {source.type} to {result.device.type}" if source.type != result.device.type else None


def _masked_assignment(name: str, args: Any) -> str | None:
    """Describe an assignment of several values to the elements that a mask selects, which CUDA counts first."""
    if name not in ("index_put", "index_put_", "_index_put_impl_") or args[2].numel() <= 1:
        return None
    is_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return "assignment to a boolean mask" if is_mask else None
