"""What a network needs for some samples: memory, operations and seconds of each of its parts.

Memory and operations come from a training step with fake tensors, which have no data. The seconds are those of training
steps on this machine.
"""

import copy
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, count
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from onecurve.errors import UserError
from onecurve.network.net import network_of
from onecurve.network.recomputation import recompute_blocks
from onecurve.network.tensors import memory_format_of
from onecurve.parallel.batch_norm import RankGroups, apply_norm_groups, revert_norm_groups
from onecurve.parallel.pipeline.blocks import Block, ordered_blocks
from onecurve.parallel.pipeline.rehearsal import input_of_network
from onecurve.parallel.pipeline.stage import extract_graph, stage_inputs
from onecurve.patches.torch import FakeTensorMode, TorchDispatchMode, is_conversion, tree_leaves
from onecurve.random.dropout import dropouts, set_keys
from onecurve.random.random_functions import sample_random

_ROUNDS, _LONG = 4, 2.0  # rounds of timed steps, and the seconds of a round after which there are no more
_LARGEST = 256  # samples of the largest batch that is timed
Watch = Callable[["Part", str], Any]  # context of a pass, `F` or `B`; a function in it gets the gradients of weights


class Operation(NamedTuple):
    """An operation of torch, with its FLOPs and the bytes that it reads and writes."""

    flops: int
    nbytes: int
    is_convolution: bool


@dataclass
class Part:
    """A part of a network between two places where a pipeline may cut it, for a number of samples.

    Attributes:
        blocks: its blocks; none if the network cannot be traced, and is one part.
        weights: its weights.
        kept: bytes that the backward pass needs, with the outputs.
        between: bytes of gradients that the first half of a backward pass keeps for the second one.
        forward_peak, backward_peak: most bytes in use during a pass, besides those in use when it begins.
        forward, backward: operations of the passes.
        sent: bytes of the outputs.
    """

    blocks: list[Block]
    weights: list[nn.Parameter]
    kept: int = 0
    between: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    forward: list[Operation] = field(default_factory=list)
    backward: list[Operation] = field(default_factory=list)
    sent: int = 0


class Profile:
    """The network of a run that is about to train on one process, and what it needs for any number of samples.

    Attributes:
        weights: the weights of the network by name.
        optimizer_bytes: bytes of the optimizer state of each weight, by its id.
        untraced: why the network is one part; None if it has several.
    """

    def __init__(self, trainer: L.Trainer, module: Any) -> None:
        self.module, self.net, self.data = module, network_of(module), trainer.datamodule
        self.precision = trainer.precision_plugin
        self.untraced: UserError | None = None
        self.weights: dict[str, nn.Parameter] = dict(self.net.named_parameters())
        self.buffer_bytes = sum(buffer.nbytes for buffer in self.net.buffers())
        self.data_bytes = sum(tensor.nbytes for tensor in _tensors_in_memory(self.data.train_dataloader().dataset))
        self.optimizer_seconds, self.optimizer_bytes = self._step(trainer.optimizers[0])
        revert_norm_groups(module)
        self.example = self._inputs(self.data.example_batch(2))
        self.cuts: list[list[Block]] = [[]]
        try:
            with self.precision.forward_context():
                blocks = ordered_blocks(self.net, self.example)
        except UserError as error:
            self.untraced = error
            return
        ends = [number + 1 for number, block in enumerate(blocks) if block.can_end_stage]
        self.cuts = [blocks[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def _step(self, optimizer: Any) -> tuple[float, dict[int, int]]:
        """Return the seconds of the optimizer's step on this machine, and the bytes of its state by id of weight."""
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        seconds = []
        for _ in range(_ROUNDS):
            begun = self._now()
            optimizer.step()
            seconds.append(self._now() - begun)
        optimizer.zero_grad()
        state = {id(weight): optimizer.state[weight].values() for weight in self.weights.values()}
        nbytes = {
            key: sum(x.nbytes for x in values if isinstance(x, Tensor) and x.ndim) for key, values in state.items()
        }
        return min(seconds), nbytes

    def _inputs(self, batch: Any) -> Tensor:
        """Return what `training_step` gives the network for a batch of the data."""
        batch = self.data.on_before_batch_transfer(self.precision.convert_input(batch), 0)
        batch = self.data.transfer_batch_to_device(batch, self.module.device, 0)
        return input_of_network(self.module, self.data.on_after_batch_transfer(batch, 0))

    @cache  # noqa: B019  # it lives as long as the plan
    def parts(self, samples: int, groups: int, recompute: bool) -> list[Part]:
        """Return the parts of the network, for the samples and normalization groups of a rank's micro-batch."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = [*self.net.parameters(), *self.net.buffers()]
        net = copy.deepcopy(self.net, {id(tensor): mode.from_tensor(tensor) for tensor in tensors})
        if recompute:
            recompute_blocks(net)
        with _in_training(net, samples, self.module.device), mode:
            inputs = self.example.new_empty(samples, *self.example.shape[1:])
            inputs = inputs.contiguous(memory_format=memory_format_of(self.example))
            with _Recorder([*net.parameters()], [*net.buffers(), inputs]) as recorder:
                return self._train(net, inputs, groups, recorder.watch)

    @cache  # noqa: B019
    def measured(self, batch_size: int, groups: int, threads: int) -> NDArray[np.float64]:
        """Return (2, n) slopes and intercepts of the seconds on this machine, which are linear in the samples.

        The n columns are all forward passes, all backward passes, and the data. Batches of two sizes take turns,
        so that other programs disturb both. `batch_size` and `groups` are those of a global batch.
        """
        small, large = max(2, min(batch_size, _LARGEST) // 8), max(4, min(batch_size, _LARGEST) // 2)
        before, rounds = torch.get_num_threads(), []
        torch.set_num_threads(threads)
        for _ in range(_ROUNDS):
            begun = time.perf_counter()
            rounds.append([self._time(size, max(1, groups * size // batch_size)) for size in (small, large)])
            if time.perf_counter() - begun > _LONG:
                break
        torch.set_num_threads(before)
        return np.polyfit([small, large], np.min(rounds, axis=0), 1)

    def _time(self, samples: int, groups: int) -> list[float]:
        seconds: dict[str, list[float]] = {"F": [], "B": []}

        @contextmanager
        def stopwatch(part: Part, kind: str) -> Iterator[Callable[[Any], None]]:
            begun = self._now()
            yield lambda _: None
            seconds[kind].append(self._now() - begun)

        batch, begun = self.data.example_batch(samples), self._now()
        inputs, data = self._inputs(batch), self._now() - begun
        with _in_training(self.net, samples, self.module.device):
            self._train(self.net, inputs, groups, stopwatch)
        return [*seconds["F"], *reversed(seconds["B"]), data]

    def _now(self) -> float:
        if self.module.device.type == "cuda":
            torch.cuda.synchronize(self.module.device)
        return time.perf_counter()

    def _train(self, net: nn.Module, inputs: Tensor, groups: int, watch: Watch) -> list[Part]:
        """Run the forward and the backward passes of the parts of a network; return the parts."""
        sizes = tuple(len(part) for part in inputs.tensor_split(groups))
        apply_norm_groups(net, RankGroups((sizes,), sizes, sizes, None, None, 1.0, 1))
        parts = [Part(blocks, self._used(self.net, blocks)) for blocks in self.cuts]
        passes: list[tuple[Part, tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        values: tuple[Tensor, ...] = (inputs,)
        with self.precision.forward_context():
            for number, (part, call) in enumerate(zip(parts, self._calls(net), strict=True)):
                received = tuple(value.detach().requires_grad_(number > 0) for value in values)
                with watch(part, "F"):
                    values = call(*received)
                part.sent = sum(value.nbytes for value in values)
                passes.append((part, received, values))
            while passes:
                part, received, values = passes.pop()
                weights = [weight for weight in self._used(net, part.blocks) if weight.requires_grad]
                outputs = [value for value in values if value.requires_grad]  # none before the first trained weight
                gradients = [torch.empty_like(value).fill_(1e-3) for value in outputs]
                with watch(part, "B") as exclude:
                    wanted = [*weights, *(value for value in received if value.requires_grad)]
                    found = (
                        torch.autograd.grad(outputs, wanted, gradients, allow_unused=True) if wanted and outputs else ()
                    )
                    exclude(found[: len(weights)])
                del received, values, outputs, wanted, found
        revert_norm_groups(net)
        return parts

    def _calls(self, net: nn.Module) -> Iterator[Callable[..., tuple[Tensor, ...]]]:
        """Yield the function of each part."""
        if self.untraced:
            yield lambda inputs: (net(inputs),)
            return
        for number, blocks in enumerate(self.cuts):
            nodes = [node for block in blocks for node in block.nodes]
            yield fx.GraphModule(net, extract_graph(nodes, stage_inputs(self.cuts, number), blocks[-1].outputs))

    @staticmethod
    def _used(net: nn.Module, blocks: Sequence[Block]) -> list[nn.Parameter]:
        """Return the weights of some blocks, or of the network if there are none; each once."""
        every = dict(net.named_parameters(remove_duplicate=False))
        names = [name for block in blocks for name in block.parameters] if blocks else list(every)
        return list({id(every[name]): every[name] for name in names}.values())


class _Recorder(TorchDispatchMode):
    """Records operations, and the bytes of tensors that come into being and are freed, besides those given."""

    def __init__(self, weights: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        super().__init__()
        # The numbers of the tensors that exist, by the id of their storage: another one may get it when that is freed.
        self.numbers = defaultdict[int, int](count().__next__)
        self.weights = {self._number(tensor) for tensor in weights}
        for tensor in others:
            self._number(tensor)
        self.weighted = 0  # bytes of the results of operations on weights
        self.events: list[tuple[int, int]] = []  # number and bytes, which are negative when it is freed
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results, read = (
            [x for x in tree_leaves(values) if isinstance(x, Tensor)] for values in (result, (args, kwargs))
        )
        for storage in [tensor.untyped_storage() for tensor in results]:
            if id(storage) not in self.numbers:
                self.events.append((self.numbers[id(storage)], storage.nbytes()))
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        if not func.is_view:
            packet, flop_count = func.overloadpacket, flop_registry.get(func.overloadpacket)
            flops = flop_count(*args, **kwargs, out_val=result) if flop_count else 0
            nbytes = sum(tensor.nbytes for tensor in [*read, *results])
            if any(self.numbers.get(id(tensor.untyped_storage())) in self.weights for tensor in read):
                if is_conversion(packet):  # a weight in the type of autocast
                    self.weights |= {self._number(tensor) for tensor in results}
                else:
                    self.weighted += sum(tensor.nbytes for tensor in results)
            self.operations.append(Operation(flops, nbytes, "convolution" in packet.__name__))
        return result

    def _number(self, tensor: Tensor) -> int:
        return self.numbers[id(tensor.untyped_storage())]

    def _free(self, storage: int, nbytes: int) -> None:
        self.events.append((self.numbers.pop(storage), -nbytes))

    @contextmanager
    def watch(self, part: Part, kind: str) -> Iterator[Callable[[Any], None]]:
        """Let `part` have the operations and bytes of a pass, except the tensors given to the yielded function."""
        self.events.clear()
        self.weighted = 0
        self.operations = part.forward if kind == "F" else part.backward
        excluded: set[int] = set()
        yield lambda found: excluded.update(self._number(x) for x in found if x is not None)
        sizes = [nbytes for number, nbytes in self.events if number not in excluded]
        peak = max(accumulate(sizes), default=0)
        if kind == "F":
            part.kept, part.forward_peak, part.between = sum(sizes), peak, self.weighted
        else:
            part.backward_peak = max(0, peak)


@contextmanager
def _in_training(net: nn.Module, samples: int, device: torch.device) -> Iterator[None]:
    """Let the random functions of a network in training draw for the samples."""
    keys = torch.arange(samples, device=device)
    if layers := dropouts(net):
        set_keys(layers, keys)
    sample_random.begin(lambda: keys, device, is_divided=False)
    net.train()
    yield
    sample_random.end()


def _tensors_in_memory(dataset: Any) -> Iterator[Tensor]:
    """Yield the tensors of a dataset, and of the one of which it is a split."""
    for owner in (dataset, getattr(dataset, "dataset", None)):
        yield from (value for value in getattr(owner, "__dict__", {}).values() if isinstance(value, Tensor))
