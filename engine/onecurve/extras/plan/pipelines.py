"""What a pipeline, and replicas of it, send, hold in memory and wait for in a training step."""

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from onecurve.extras.plan.profile import Part, Profile
from onecurve.extras.plan.step import Collective, Estimate, Job
from onecurve.extras.plan.strategies import OneDevice, padded, peak_bytes
from onecurve.extras.report.simulation import Action, Pass, bubble, duration, simulate
from onecurve.parallel.pipeline.rehearsal import check_module
from onecurve.parallel.pipeline.split import cut
from onecurve.parallel.pipeline.stage import called_modules


class Stages(OneDevice):
    """A pipeline, and replicas of it: the rank of the stages that need most memory."""

    rank: int
    own_stages: list[int]
    batch_copies = 4  # one in the order of the micro-batches, and that in their memory format

    def __init__(self, strategy: Any, profile: Profile, job: Job) -> None:
        strategy.check_world_size(job.ranks)
        strategy.check_precision(job.precision)
        compiles = getattr(profile.module, "should_compile", False)
        strategy.check_options(
            SimpleNamespace(should_compile=compiles, recompute="blocks" if job.recompute else "none")
        )
        check_module(profile.module)
        if profile.untraced:
            raise profile.untraced
        self.model_ranks, self.micro_batches = strategy.stages or job.ranks, strategy.microbatches
        super().__init__(strategy, profile, job)
        if job.is_bit_exact:  # micro-batches are virtual ranks
            self.micro_batches, self.count = self.count, 1
        self.rank_of = strategy.spec.stage_to_rank(self.model_ranks)
        blocks = [block for part in self.parts for block in part.blocks]
        number_of = {part.blocks[0].name: number for number, part in enumerate(self.parts)}
        stages = cut(blocks, len(self.rank_of), strategy.split)
        bounds = [*(number_of[stage[0].name] for stage in stages), len(self.parts)]
        self.stages = [range(start, end) for start, end in pairwise(bounds)]  # of parts
        counts = self.model_ranks, self.micro_batches
        self.timeline = simulate(strategy.schedule, *counts, self._duration, self._send_seconds)
        self.shards = self.replicas if strategy.data_parallel == "fsdp" else 1

    def estimate(self) -> Estimate:
        ranks = [self.at_rank(rank) for rank in range(self.model_ranks)]
        largest = max(ranks, key=lambda rank: sum(rank.memory().values()))
        return super(Stages, largest).estimate()

    def at_rank(self, rank: int) -> "Stages":
        """Return the description of a rank, by its number in its pipeline."""
        own = copy.copy(self)
        own.rank, own.own_stages = rank, [stage for stage, owner in enumerate(self.rank_of) if owner == rank]
        own.weights = [weight for stage in own.own_stages for weight in self._weights_of(stage)]
        return own

    def _weights_of(self, stage: int) -> list[nn.Parameter]:
        return [weight for number in self.stages[stage] for weight in self.parts[number].weights]

    def networks(self) -> list[tuple[list[nn.Parameter], list[Tensor]]]:
        net, found = self.profile.net, list[tuple[list[nn.Parameter], list[Tensor]]]()
        for stage in self.own_stages:
            names = called_modules(block for number in self.stages[stage] for block in self.parts[number].blocks)
            buffers = {id(buffer): buffer for name in names for buffer in net.get_submodule(name).buffers()}
            trained = [weight for weight in self._weights_of(stage) if weight.requires_grad]
            found.append((trained, list(buffers.values())))
        of_network = set(map(id, net.buffers()))
        return [*found, ([], [buffer for buffer in self.profile.module.buffers() if id(buffer) not in of_network])]

    def _duration(self, action: Action) -> float:
        forward, backward = (sum(self.passes[i][kind] for i in self.stages[action.stage]) for kind in (0, 1))
        seconds = {"F": forward, "B": backward, "": 0.0}.get(self._kind(action), backward / 2)
        # A CPU sends with the cores that compute, and receives with those of the other rank.
        if not self.job.hardware.overlaps and action.kind != "W":
            seconds += self._send_seconds(action.stage, action.stage + (1 if action.kind == "F" else -1))
        return seconds

    @staticmethod
    def _kind(action: Action | Pass) -> str:
        """Return the kind of a pass; torch computes all gradients of the first stage in `W`, and none in `I`."""
        return {"I": "", "W": "B"}.get(action.kind, action.kind) if action.stage == 0 else action.kind

    def _send_seconds(self, sender: int, receiver: int) -> float:
        if receiver not in range(len(self.rank_of)) or self.rank_of[sender] == self.rank_of[receiver]:
            return 0.0
        return self._send(min(sender, receiver)).seconds(self.job)

    def _send(self, stage: int, calls: int = 1) -> Collective:
        """Return the sends between a stage and the next one."""
        hosts = {self.rank_of[number] // self.job.per_host for number in (stage, stage + 1)}
        return Collective("send", self._sent(stage), 2, 1 if len(hosts) == 1 else self.job.per_host, calls)

    def _sent(self, stage: int) -> int:
        """Return the bytes that a stage sends for a micro-batch, and gets back as gradients; the last one, none."""
        return self.parts[self.stages[stage][-1]].sent if 0 <= stage < len(self.rank_of) - 1 else 0

    def collectives(self) -> list[Collective]:
        batches, replicas, apart = self.count, self.replicas, self.model_ranks
        outputs = self.parts[-1].sent * self.micro_batches
        found = [Collective("broadcast", outputs, self.model_ranks, 1, batches)]
        if self.shards == 1 and not self.job.is_bit_exact:
            nbytes = sum(weight.nbytes for weight in self.trained)
            found.append(Collective("all_reduce", nbytes, replicas, apart, batches))
        for weights in map(self._weights_of, self.own_stages if self.shards > 1 else ()):
            trained = [weight for weight in weights if weight.requires_grad]
            for kind, used in {"all_gather": weights, "reduce_scatter": trained}.items():
                found.append(Collective(kind, padded(used, self.shards), self.shards, apart, batches))
        for stage, pair in enumerate(pairwise(self.rank_of)):
            if self.rank in pair and pair[0] != pair[1]:
                found.append(self._send(stage, 2 * self.micro_batches * batches))
        return found

    def memory(self) -> dict[str, int]:
        memory = super().memory()
        # FSDP gathers the stages once a batch; replicas average a copy of the gradients.
        gathered = 2 * memory["weights"] if self.shards > 1 else memory["gradients"] if self.replicas > 1 else 0
        received = sum(self._sent(stage - 1) + self._sent(stage) for stage in self.own_stages) * self.micro_batches
        for name in ("weights", "gradients", "optimizer"):
            memory[name] //= self.shards
        return memory | {"gathered": gathered, "received": received}

    def activation_bytes(self) -> int:
        in_turn: list[tuple[Part, str]] = []
        for entry in self.timeline[self.rank]:
            kind = self._kind(entry)
            if not kind:
                continue
            parts = [self.parts[i] for i in self.stages[entry.stage]]
            nbytes = self._sent(entry.stage - 1) + self._sent(entry.stage)
            transit = Part([], [], kept=nbytes, forward_peak=nbytes)  # copies in the memory format that is sent
            in_turn += [(part, kind) for part in ([transit, *parts] if kind == "F" else [*parts[::-1], transit])]
        return peak_bytes(in_turn)

    def seconds(self) -> dict[str, float]:
        seconds, batches = super().seconds(), self.count
        length = duration(self.timeline)
        forward = sum(entry.end - entry.start for passes in self.timeline for entry in passes if entry.kind == "F")
        seconds["forward"] = batches * forward / self.model_ranks
        seconds["bubble"] = batches * bubble(self.timeline) * length
        seconds["backward"] = batches * length - seconds["forward"] - seconds["bubble"]
        return seconds
