"""What each strategy sends, holds in memory and waits for in a training step, in closed form from a profile.

Each class describes the rank that needs most. What ranks send at log points, and about once a second to agree whether
to stop, is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from onecurve.data.layout import BatchLayout, DataParallelInfo, Division
from onecurve.errors import UserError
from onecurve.extras.plan.profile import Operation, Part, Profile
from onecurve.extras.plan.step import Collective, Estimate, Job
from onecurve.network.precision import is_double
from onecurve.parallel.batch_norm import ranks_that_share
from onecurve.parallel.compatibility import check_can_be_bit_exact
from onecurve.parallel.norm_groups import check_groups
from onecurve.parallel.tree_sum import buckets, nodes_of
from onecurve.parallel.virtual_ranks import LOGGED_COLUMNS
from onecurve.patches.torch import AnyBatchNorm, ddp_buckets
from onecurve.process.devices import cores_per_rank
from onecurve.run.bit_exact import num_threads

_BUCKETS = [1 << 20, 25 << 20]  # bytes of DistributedDataParallel's first bucket, and of the others
_HOOKS = {None: 1.0, "fp16": 0.5, "bf16": 0.5}  # the bytes of a float32 gradient under them, as a fraction


class OneDevice:
    """A step of one process without a strategy; the strategies differ in some of its parts.

    A UserError is the one with which the run would end, as for a batch that does not divide.
    """

    model_ranks, micro_batches = 1, 1  # ranks that share a replica, and micro-batches into which it divides a batch
    batch_copies = 2  # as the data module makes it, and in the memory format of the network
    sums_in_passes = False  # of virtual ranks, which ranks then take in turn; otherwise their gradients are added later

    def __init__(self, strategy: Any, profile: Profile, job: Job) -> None:
        self.strategy, self.profile, self.job = strategy, profile, job
        self.replicas = job.ranks // self.model_ranks
        if job.is_bit_exact:
            self._count_virtual_ranks()
        else:
            samples = self._layout(0).counts.sum(1)  # of each rank in a micro-batch
            self.layout, self.count = self._layout(int(samples.argmax())), job.layout.accumulate
            self.samples = int(samples.max())
        norms = [part for part in profile.net.modules() if isinstance(part, AnyBatchNorm)]
        self.norms = norms if job.is_synchronized and not job.is_bit_exact else []
        if self.norms:
            check_groups(self.layout)
        own_groups = int((self.layout.counts[self.layout.parallel.dp_rank] > 0).sum())
        self.parts = profile.parts(self.samples, own_groups, job.recompute)
        self.passes, self.data_seconds = self._pass_seconds()
        self.weights = list(profile.weights.values())  # those that the rank holds, if only a shard of each

    def _count_virtual_ranks(self) -> None:
        """Describe the passes of virtual ranks, in each of which a rank has the samples of one."""
        count = self.job.layout.virtual_ranks
        if self.job.ranks > 1:
            check_can_be_bit_exact(self.strategy, count, self.job.ranks)
        parallel = replace(self._layout(0).parallel, num_microbatches=1, in_turn=self.sums_in_passes)
        of_rank = [parallel.virtual_ranks(count, rank) for rank in range(self.replicas)]
        division = Division(parallel, 1, count, bit_exact=True, has_pairs=self.job.layout.has_pairs)
        self.layout = division.layouts(self.job.layout.batch_size)[0]
        self.samples = int(self.layout.counts.sum(1).max())
        self.count = max(map(len, of_rank))
        self.nodes = max(len(nodes_of(own)) for own in of_rank)

    def _layout(self, rank: int) -> BatchLayout:
        shares = getattr(self.strategy, "shares", None)
        parallel = DataParallelInfo(self.replicas, rank, self.micro_batches, tuple(shares) if shares else None)
        return replace(self.job.layout, parallel=parallel)

    def _pass_seconds(self) -> tuple[list[tuple[float, float]], float]:
        """Return the seconds of the forward and the backward pass of each part for a micro-batch, and of its data."""
        job, hardware = self.job, self.job.hardware
        if not hardware.tflops:
            threads = max(1, cores_per_rank(job.per_host)) if job.per_host > 1 else torch.get_num_threads()
            threads = num_threads() if job.is_bit_exact else threads
            groups = 1 if job.is_bit_exact else job.layout.virtual_ranks
            slopes, intercepts = self.profile.measured(job.layout.batch_size, groups, threads)
            slower = max(1.0, job.per_host / hardware.devices_per_node)  # processes that share a core
            *times, data = (slower * (intercepts + slopes * self.samples).clip(min=0.0)).tolist()
            passes = zip(times[: len(self.parts)], times[len(self.parts) :], strict=True)
            return [(forward, backward + forward * job.recompute) for forward, backward in passes], data

        def seconds(operations: Sequence[Operation]) -> float:
            return sum(hardware.operation_seconds(*operation, job.precision) for operation in operations)

        return [(seconds(part.forward), seconds(part.backward)) for part in self.parts], 0.0

    def estimate(self) -> Estimate:
        return Estimate(self.memory(), self.all_collectives(), self.seconds())

    def all_collectives(self) -> list[Collective]:
        sums = self.tree_collectives() if self.job.is_bit_exact else ()
        return [one for one in [*self.norm_collectives(), *self.collectives(), *sums] if one.ranks > 1]

    def norm_collectives(self) -> Iterator[Collective]:
        """Yield those of batch normalization whose groups several ranks share: moments, and sums of gradients."""
        sharing, held = ranks_that_share(self.layout), {id(weight) for weight in self.weights}
        groups, ranks = int((self.layout.counts[sharing].sum(0) > 0).sum()), len(sharing)
        size = 8 if is_double(self.job.precision) else 4
        for norm in self.norms:
            if norm.weight is None or id(norm.weight) in held:
                nbytes = 2 * groups * norm.num_features * size
                yield Collective("all_gather", nbytes * ranks, ranks, self.model_ranks, self.layout.micro_batches)
                yield Collective("all_reduce", nbytes, ranks, self.model_ranks, self.layout.micro_batches)

    def tree_collectives(self) -> list[Collective]:
        """Return those that add gradients, buffers and logged values over virtual ranks, after the passes."""
        integers, sums = self.job.layout.virtual_ranks * LOGGED_COLUMNS, list[Collective]()
        for weights, buffers in self.networks():
            means = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
            integers += len(weights) + sum(buffer.numel() for buffer in buffers) - sum(x.numel() for x in means)
            sums += self._sums([*(() if self.sums_in_passes else weights), *means])
        return [Collective("all_reduce", 8 * integers, self.replicas, self.model_ranks), *sums]

    def networks(self) -> list[tuple[list[nn.Parameter], list[Tensor]]]:
        """Return the trained weights and the buffers of each network whose passes the rank computes."""
        return [(self.trained, list(self.profile.module.buffers()))]

    def _sums(self, tensors: Sequence[Any]) -> Iterator[Collective]:
        ranks = self.replicas
        for bucket in buckets(tensors):
            size = tensors[bucket[0]].itemsize
            nbytes = -(-sum(tensors[number].numel() for number in bucket) // ranks) * ranks * size
            yield Collective("all_to_all", self.nodes * nbytes, ranks, self.model_ranks)
            yield Collective("all_gather", nbytes, ranks, self.model_ranks)

    def collectives(self) -> list[Collective]:
        """Return those of the strategy, of which some may have a group of one rank."""
        return []

    def memory(self) -> dict[str, int]:
        return {
            "weights": sum(weight.nbytes for weight in self.weights) + self.profile.buffer_bytes,
            "gradients": sum(weight.nbytes for weight in self.trained) * self.gradient_copies,
            "optimizer": self.optimizer_bytes(),
            "activations": self.activation_bytes(),
            "batch": self.batch_copies * self.samples * self.micro_batches * self.profile.example[0].nbytes,
            "data set": self.profile.data_bytes,
        }

    @property
    def gradient_copies(self) -> int:
        """The most copies of the gradients: those of a pass, and a sum for each power of two of virtual ranks."""
        return self.count.bit_length() if self.job.is_bit_exact else 1

    @property
    def trained(self) -> list[nn.Parameter]:
        return [weight for weight in self.weights if weight.requires_grad]

    def optimizer_bytes(self) -> int:
        return sum(self.profile.optimizer_bytes[id(weight)] for weight in self.trained)

    def activation_bytes(self) -> int:
        """Return the bytes at the peak of the passes, which follow each other."""
        return peak_bytes([(part, "F") for part in self.parts] + [(part, "B") for part in reversed(self.parts)])

    def seconds(self) -> dict[str, float]:
        """Return the seconds of a step by part, with all its micro-batches."""
        count, hardware = self.count, self.job.hardware
        forward, backward = (count * sum(times) for times in zip(*self.passes, strict=True))
        collectives = [one for one in self.all_collectives() if one.kind != "send"]  # sends delay passes instead
        hidden = sum(one.seconds(self.job) for one in collectives if one.overlaps and hardware.overlaps)
        waiting = sum(one.seconds(self.job) for one in collectives) - min(hidden, self.hiding_seconds())
        parts = {"data": count * self.data_seconds, "forward": forward, "backward": backward}
        return parts | {"communication": waiting, "optimizer": self.optimizer_seconds()}

    def hiding_seconds(self) -> float:
        """Return the seconds of the passes that may hide collectives."""
        return self.count * sum(map(sum, self.passes))

    def optimizer_seconds(self) -> float:
        memory = self.memory()
        gradients = memory["gradients"] // self.gradient_copies
        if self.job.hardware.tflops:
            return self.job.hardware.copy_seconds(3 * gradients + 2 * memory["optimizer"])
        every = sum(weight.nbytes for weight in self.profile.weights.values())
        return self.profile.optimizer_seconds * gradients / every


class Replicas(OneDevice):
    """DistributedDataParallel, whose all-reduces overlap with the last backward pass of a step."""

    def __init__(self, strategy: Any, profile: Profile, job: Job) -> None:
        if strategy.comm_hook not in _HOOKS:
            raise UserError(f"strategy.comm_hook={strategy.comm_hook} cannot be planned: set null, fp16 or bf16")
        super().__init__(strategy, profile, job)

    def collectives(self) -> list[Collective]:
        limit, ranks = self.strategy.ddp_options.get("bucket_cap_mb"), self.job.ranks
        weights: list[Any] = self.trained[::-1]  # in this order their gradients are ready
        buckets = ddp_buckets(weights, [limit << 20] if limit else _BUCKETS)
        fraction, found = _HOOKS[self.strategy.comm_hook], []
        for number, bucket in enumerate(() if self.job.is_bit_exact else buckets, 1):
            nbytes = int(sum(weights[i].nbytes for i in bucket) * fraction)
            found.append(Collective("all_reduce", nbytes, ranks, overlaps=number < len(buckets)))
        if self.strategy.shard_optimizer:
            found += [Collective("broadcast", weight.nbytes, ranks) for weight in self.trained]
        return found

    def hiding_seconds(self) -> float:
        return sum(backward for _, backward in self.passes)  # of the last micro-batch

    def optimizer_bytes(self) -> int:
        if not self.strategy.shard_optimizer:
            return super().optimizer_bytes()
        ranks = [(0, 0)] * self.job.ranks  # numbers and bytes of each; ZeRO deals out the largest weights first
        for weight in sorted(self.trained, key=lambda weight: -weight.numel()):
            least = min(range(len(ranks)), key=lambda rank: ranks[rank][0])
            ranks[least] = ranks[least][0] + weight.numel(), ranks[least][1] + self.profile.optimizer_bytes[id(weight)]
        return max(nbytes for _, nbytes in ranks)

    def memory(self) -> dict[str, int]:
        memory = super().memory()
        if not (self.job.is_bit_exact or self.strategy.ddp_options["gradient_as_bucket_view"]):
            memory["buckets"] = memory["gradients"]
        return memory


class Shards(OneDevice):
    """FSDP2: all-gathers of weights and reduce-scatters of gradients, one group of weights after the other."""

    sums_in_passes = True

    def __init__(self, strategy: Any, profile: Profile, job: Job) -> None:
        strategy.check_world_size(job.ranks)
        super().__init__(strategy, profile, job)
        self.shards = job.ranks // strategy.replicas
        if scalars := [name for name, weight in profile.weights.items() if not weight.ndim]:
            raise UserError(f"strategy=fsdp cannot shard {scalars[0]}, a single number: give it the shape (1,)")
        self.gathered: list[tuple[list[nn.Parameter], bool]] = []  # weights, and whether they are those of a norm
        seen: set[int] = set()
        for module in strategy.gathered_modules(profile.net):
            if group := [weight for weight in module.parameters() if id(weight) not in seen]:
                self.gathered.append((group, isinstance(module, AnyBatchNorm)))
            seen |= {id(weight) for weight in group}

    def collectives(self) -> list[Collective]:
        policy, count, shards, found = self.strategy.policy, self.count, self.shards, list[Collective]()
        reduction = "all_to_all" if self.job.is_bit_exact else "reduce_scatter"
        for number, (group, is_norm) in enumerate(self.gathered):
            stored = group[0].itemsize
            has_policy = not (policy.param_dtype and is_norm)
            size = policy.param_dtype.itemsize if has_policy and policy.param_dtype else stored
            gathers = 2 if self.strategy.reshard_after_forward or not has_policy else 1
            hides: Any = {"overlaps": number > 0}  # no pass hides the first all-gather and the last reduce-scatter
            gathered = padded(group, shards) * size // stored
            found.append(Collective("all_gather", gathered, shards, 1, count * gathers, **hides))
            size = policy.reduce_dtype.itemsize if has_policy and policy.reduce_dtype else size
            if reduced := padded([w for w in group if w.requires_grad], shards) * size // stored:
                found.append(Collective(reduction, reduced, shards, 1, count, **hides))
                replicas = self.strategy.replicas
                found.append(Collective("all_reduce", reduced // shards, replicas, shards, count, **hides))
        return found

    def seconds(self) -> dict[str, float]:
        # Weights are copied out of what was gathered, and gradients into what is reduced.
        hardware, own = self.job.hardware, [one for one in self.collectives() if one.kind != "all_reduce"]
        copies = hardware.copy_seconds(sum(2 * one.nbytes * one.calls for one in own))
        python = hardware.sharding_us * 1e-6 * sum(one.calls for one in own)
        return super().seconds() | {"sharding": copies + python}

    def memory(self) -> dict[str, int]:
        sizes = [padded(group, self.shards) for group, _ in self.gathered]
        every, largest = sum(sizes), max(sizes)
        weights = min(2 * largest, every) if self.strategy.reshard_after_forward else every
        memory = super().memory() | {"gathered": weights + 2 * largest}  # and the gradients, before they are reduced
        memory["weights"] = every // self.shards + self.profile.buffer_bytes
        memory["gradients"] = padded(self.trained, self.shards) // self.shards * self.gradient_copies
        return memory

    def optimizer_bytes(self) -> int:
        padding = padded(self.trained, self.shards) / sum(weight.nbytes for weight in self.trained)
        return int(super().optimizer_bytes() * padding / self.shards)


def padded(weights: Sequence[nn.Parameter], shards: int) -> int:
    """Return the bytes of weights whose first dimension FSDP2 pads to a multiple of the shards."""
    return sum(-(-len(weight) // shards) * shards * weight[0].nbytes for weight in weights)


def peak_bytes(passes: Sequence[tuple[Part, str]]) -> int:
    """Return the most bytes of activations in passes that follow each other: `F`, `B`, or `I` and `W` as its halves."""
    in_use = largest = 0
    for part, kind in passes:
        largest = max(largest, in_use + (part.forward_peak if kind == "F" else part.backward_peak))
        in_use += {"F": part.kept, "B": -part.kept, "I": part.between, "W": -part.kept - part.between}[kind]
    return largest
