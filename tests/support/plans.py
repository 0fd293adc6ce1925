"""Plans as tests compare them with runs."""

from collections import Counter
from collections.abc import Iterable
from unittest.mock import patch

from omegaconf import DictConfig

from engine.dev.dry_gpu.collectives import describe
from onecurve.extras.plan.pipelines import Stages
from onecurve.extras.plan.plan import begin_run, estimate
from onecurve.targets import build


def planned_collectives(cfg: DictConfig, words: list[str], ranks: Iterable[int]) -> list[Counter[str]]:
    """Return the collectives that each of these ranks has in a step, according to the plan of a strategy."""
    profile, job, _ = begin_run(cfg, build(cfg.hardware))
    at_rank, found = Stages.at_rank, []
    for rank in ranks:
        # The plan of a pipeline is that of the rank that needs most.
        with patch.object(Stages, "at_rank", lambda self, _, rank=rank: at_rank(self, rank % self.model_ranks)):
            own = estimate(words, cfg, profile, job)
        assert own.estimate, own.reason
        found.append(Counter[str]())
        for one in own.estimate.collectives:
            found[-1][describe(one.kind, one.nbytes, one.ranks)] += one.calls
    return found
