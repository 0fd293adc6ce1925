"""A training step as a plan describes it: what it computes and where, its collectives, memory and seconds."""

from dataclasses import dataclass

from onecurve.data.layout import BatchLayout
from onecurve.extras.plan.hardware import Hardware

_USABLE = 0.95  # fraction of a device's memory
_RING_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}  # over all ranks but one


@dataclass(frozen=True)
class Job:
    """What a run computes, and on what."""

    hardware: Hardware
    ranks: int  # of all hosts
    per_host: int  # ranks
    layout: BatchLayout  # of the global batch and its micro-batches, on one process
    is_synchronized: bool  # `trainer.sync_batchnorm`
    is_bit_exact: bool
    precision: str
    recompute: bool  # whether blocks compute their activations again

    @property
    def memory(self) -> float:
        """Bytes that a rank may use; processes on CPUs share those of their host."""
        return _USABLE * self.hardware.memory_gib * 2**30 / (1 if self.hardware.overlaps else self.per_host)


@dataclass(frozen=True)
class Collective:
    """Equal calls of a collective by a rank in a step."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, or send for a send or a receive
    nbytes: int  # of the full tensor of a call
    ranks: int  # of the group
    stride: int = 1  # distance of their numbers
    calls: int = 1
    overlaps: bool = False  # whether a device computes meanwhile, if it can

    def is_within_host(self, job: Job) -> bool:
        """Return whether all ranks of the group are on one host."""
        return (self.ranks - 1) * self.stride < job.per_host

    @property
    def sent(self) -> float:
        """Bytes that a ring algorithm sends per rank, on average, in all calls (Patarasuk and Yuan, 2009)."""
        if self.kind == "send":
            return self.calls * self.nbytes
        rounds = _RING_ROUNDS.get(self.kind, 1)  # in a broadcast all ranks but the last one hand the bytes on
        return self.calls * self.nbytes * rounds * (self.ranks - 1) / self.ranks

    def seconds(self, job: Job) -> float:
        """Return the seconds of all calls, by a ring, or by a tree if that is faster for many ranks."""
        hardware, others, rounds = job.hardware, self.ranks - 1, _RING_ROUNDS.get(self.kind)
        is_within = self.is_within_host(job)
        if rounds is None:
            return self.calls * hardware.message_seconds(is_within, self.nbytes, 1)
        if self.kind == "reduce_scatter" and not hardware.overlaps:
            rounds = 2  # gloo's is an all-reduce: https://github.com/pytorch/pytorch/issues/118911
        ring = hardware.message_seconds(is_within, rounds * self.nbytes * others / self.ranks, rounds * others)
        tree = hardware.message_seconds(is_within, 2 * self.nbytes, 2 * others.bit_length())
        return self.calls * min(ring, tree)


@dataclass
class Estimate:
    """A training step of the rank that needs most."""

    memory: dict[str, int]  # bytes by category
    collectives: list[Collective]  # what the rank sends and receives
    seconds: dict[str, float]  # of the step, by part

    @property
    def nbytes(self) -> int:
        return sum(self.memory.values())

    @property
    def step_ms(self) -> float:
        return round(1000 * sum(self.seconds.values()), 3)
