"""With `bit_exact=true`: the passes of a run's virtual ranks, one by one. The same bits on any hardware.

Otherwise virtual ranks are computed together, and are the groups of `batch_norm.py` only.

Each virtual rank has a forward and a backward pass of its own, on its samples of the global batch, and begins with the
buffers that the step began with. Gradients and buffers are then added over all virtual ranks in the order of one tree
(`tree_sum.py`). So the run is that of DistributedDataParallel on so many processes. Or et al., "VirtualFlow" (2022);
Li et al., "EasyScale" (2022).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onecurve.data.batch import StepPart
from onecurve.errors import UserError
from onecurve.network.compilation import constant
from onecurve.network.tensors import upcast_half
from onecurve.observe.step_times import timed_communication
from onecurve.parallel.tree_sum import TreeSum, sum_over_ranks
from onecurve.patches.torch import AnyBatchNorm
from onecurve.process.gather import collectives_replaced

LOGGED_COLUMNS = 64  # processes exchange tables with a multiple of so many columns, also if they log different values


class VirtualRanks:
    """Computes the virtual ranks of this process in a step. The process holds the full network.

    A strategy whose processes hold less has a subclass as its attribute `virtual_rank_passes`.

    Attributes:
        of_processes: the virtual ranks of each data-parallel process.
        own: those of this process.
    """

    def __init__(self, trainer: Any, step: int) -> None:
        self.trainer, self.step, self.count = trainer, step, trainer.datamodule.virtual_ranks
        parallel = trainer.datamodule.parallel
        self.of_processes = [parallel.virtual_ranks(self.count, rank) for rank in range(parallel.dp_size)]
        self.own = self.of_processes[parallel.dp_rank]
        self.group = (trainer.distributed_sampler_kwargs or {}).get("group")
        self.sums = [PassSums(parts, self.count, self.own) for parts in self.networks()]

    def networks(self) -> Sequence[Sequence[nn.Module]]:
        """Return the modules of each network whose gradients and buffers this process computes."""
        return [list(self.trainer.lightning_module.modules())]

    def begin_pass(self, place: int, part: StepPart) -> None:
        """Let samples, metrics and random numbers be those of the virtual rank `own[place]`."""
        number = self.own[place]
        self.trainer.datamodule.use_samples_of(part)
        self.trainer.virtual_metrics.enter(number)
        self.trainer.random_numbers.begin_virtual_rank(self.trainer, self.step, number)

    @contextmanager
    def one_pass(self, place: int, part: StepPart) -> Iterator[None]:
        """Return a context for the forward and the backward pass of the virtual rank `own[place]`."""
        self.begin_pass(place, part)
        sums = self.sums[-1]  # a pipeline's schedule computes the others, the stages
        with without_collectives(self.trainer.strategy):
            sums.copy_buffers()
            yield
            sums.add_buffers(place)
            sums.add_gradients(place)

    def keep_gradients(self) -> None:
        """Keep gradients that the module has not reset: they count once in the step, not in each virtual rank."""
        for sums in self.sums:
            sums.keep_gradients()

    def finish(self, rows: Tensor) -> Tensor:
        """End the passes of the step, and set its gradients and buffers; return the rows of all virtual ranks.

        Every process must call it, with a row for each own virtual rank: n numbers, of which the first is its loss.
        """
        self.trainer.random_numbers.end_virtual_ranks(self.trainer, self.step)
        self.trainer.virtual_metrics.leave()
        return self._add_over_processes(rows)

    @timed_communication()
    @torch.no_grad()
    def _add_over_processes(self, rows: Tensor) -> Tensor:
        table = rows.new_zeros(self.count, -(-rows.shape[1] // LOGGED_COLUMNS) * LOGGED_COLUMNS)
        table[self.own.start : self.own.stop : self.own.step, : rows.shape[1]] = rows
        integers = [table.view(torch.int64).flatten(), *(sums.exchanged_integers(table.device) for sums in self.sums)]
        if len(self.of_processes) > 1:
            # A number is zero in all processes but one, so that the sum of its bits is exact.
            total = torch.cat(integers)
            dist.all_reduce(total, group=self.group)
            integers = list(total.split([len(part) for part in integers]))
        for sums, part in zip(self.sums, integers[1:], strict=True):
            sums.finish(part, self.of_processes, self.group)
        return integers[0].view(rows.dtype).view_as(table)


class PassSums:
    """The gradients and the buffers of a network, or of a stage of it, added over the passes of a step.

    During a pass the network has copies of its buffers. A write into the buffers themselves would invalidate what
    autograd has saved of them, as it does of the running statistics of batch normalization.
    """

    def __init__(self, modules: Sequence[nn.Module], count: int, own: range) -> None:
        self.count, self.own, self._modules = count, own, modules
        weights = dict.fromkeys(weight for part in modules for weight in part.parameters(recurse=False))
        self.weights = [weight for weight in weights if weight.requires_grad]
        self._kept: list[Tensor | None] = [None] * len(self.weights)
        self._owners = self._buffers()
        buffers = dict.fromkeys(buffer for *_, buffer in self._owners)  # a buffer may have two names
        self._floats = [buffer for buffer in buffers if _has_mean(buffer)]
        self._integers = [buffer for buffer in buffers if not _has_mean(buffer)]
        # A buffer that no pass changes stays as it is. If a hook has changed that of one rank, `ReplicaCheck` finds it.
        kept = dict.fromkeys(buffer for part, _, buffer in self._owners if not isinstance(part, AnyBatchNorm))
        self._has_changed = {buffer: buffer.new_zeros((), dtype=torch.int64) for buffer in kept}
        self._gradients, self._means = TreeSum(), TreeSum()
        self._has_gradient = [False] * len(self.weights)
        # What virtual rank 0 has left; zeros if another process computes it.
        self._integers_of_first = [torch.zeros_like(buffer) for buffer in self._integers]

    def _buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        named = [(part, part.named_buffers(recurse=False, remove_duplicate=False)) for part in self._modules]
        return [(part, name, buffer) for part, buffers in named for name, buffer in buffers]

    def copy_buffers(self) -> None:
        """Give the network copies of its buffers, for a forward pass."""
        copies = {buffer: buffer.clone() for buffer in (*self._floats, *self._integers)}
        for part, name, buffer in self._owners:
            setattr(part, name, copies[buffer])

    def add_buffers(self, place: int) -> None:
        """Add the buffers that the forward pass of the virtual rank `own[place]` has left."""
        if changed := _shapes(self._owners) ^ _shapes(self._buffers()):
            _, name, _ = changed.pop()
            raise UserError(
                f"bit_exact=true: the forward pass adds, removes or resizes the buffer {name}, of which virtual ranks "
                "need a mean: give it its shape in the constructor"
            )
        now: dict[Tensor, Any] = {buffer: part.get_buffer(name) for part, name, buffer in self._owners}
        # A sum of masks of the smallest float would overflow; 1 / count is exact, because `Division` takes powers of 2.
        self._means.add([upcast_half(now[buffer]) / self.count for buffer in self._floats], self.own[place])
        for buffer, count in self._has_changed.items():
            count += (now[buffer] != buffer).any()
        if self.own[place] == 0:
            self._integers_of_first = [now[buffer] for buffer in self._integers]

    def keep_gradients(self) -> None:
        self._kept = [weight.grad for weight in self.weights]
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def add_gradients(self, place: int) -> None:
        """Add the gradients of the virtual rank `own[place]`, which its backward pass has computed."""
        gradients = list[Tensor]()
        for number, weight in enumerate(self.weights):
            self._has_gradient[number] |= weight.grad is not None
            gradients.append(torch.zeros_like(weight) if weight.grad is None else weight.grad)
            weight.grad = None
        # If this process computes every n-th virtual rank, FSDP2 has added the gradients of n processes.
        processes = self.own.step
        first = self.own[place] - self.own[place] % processes
        self._gradients.add(gradients, first, processes)

    def exchanged_integers(self, device: torch.device) -> Tensor:
        """Return (n,) int64: which weights have gradients, which buffers change, and those of virtual rank 0."""
        flags = constant(tuple(self._has_gradient), torch.int64, device)
        others = (*self._has_changed.values(), *self._integers_of_first)
        return torch.cat([flags, *(buffer.flatten().long() for buffer in others)])

    def finish(self, integers: Tensor, of_processes: Sequence[range], group: Any) -> None:
        """Set the gradients of the weights, and the buffers. Every process of the group must call it.

        It takes the sum of `exchanged_integers()` over the processes, and the virtual ranks of each process.
        """
        sizes = [len(self.weights), len(self._has_changed), *(buffer.numel() for buffer in self._integers)]
        has_gradient, has_changed, *first = integers.split(sizes)
        gradients, means = self._add(of_processes, group)
        # The host waits for the device only if no pass of this process has computed some gradient.
        self._set_gradients(gradients, self._has_gradient if all(self._has_gradient) else has_gradient.tolist())
        for part, name, buffer in self._owners:
            setattr(part, name, buffer)
        changes = dict(zip(self._has_changed, has_changed.bool(), strict=True))
        for buffer, value in zip((*self._floats, *self._integers), (*means, *first), strict=True):
            value = value.view(buffer.shape)
            buffer.copy_(torch.where(changes[buffer], value, buffer) if buffer in changes else value)

    def _set_gradients(self, gradients: list[Tensor], has_gradient: list[bool]) -> None:
        for weight, gradient, kept, has_one in zip(self.weights, gradients, self._kept, has_gradient, strict=True):
            weight.grad = kept
            if has_one:
                weight.grad = gradient if kept is None else gradient + kept

    def _add(self, of_processes: Sequence[range], group: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return the sums of the gradients, and the means of the buffers, over all virtual ranks."""
        gradients, means = self._gradients.nodes, self._means.nodes
        if self.own.step > 1:  # FSDP has added the gradients over the processes
            return gradients[0, self.count], sum_over_ranks(self._means, of_processes, group)
        both = TreeSum()
        both.nodes = {key: [*gradients[key], *means[key]] for key in gradients}
        sums = sum_over_ranks(both, of_processes, group)
        return sums[: len(self.weights)], sums[len(self.weights) :]


def _has_mean(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _shapes(buffers: Sequence[tuple[nn.Module, str, Tensor]]) -> set[tuple[nn.Module, str, torch.Size]]:
    return {(part, name, buffer.shape) for part, name, buffer in buffers}


def without_collectives(strategy: Any) -> Any:
    """Return a context in which a step that communicates ends in a UserError: other ranks have not come so far."""
    return collectives_replaced(strategy, _refuse)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UserError(
        "bit_exact=true computes the virtual ranks one by one, and a step of the module communicates between ranks "
        "(all_gather, reduce): log with sync_dist=True instead. For a loss over the samples of all ranks set "
        "bit_exact=false, and gather whatever trainer.world_size is, which is 1 there on any hardware"
    )
