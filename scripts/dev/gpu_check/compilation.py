"""torch.compile of the default model: captured graphs, and losses equal to those of the uncompiled run."""

from collections import Counter

from torch._dynamo.utils import counters

from scripts.dev.gpu_check.case import Session, expect
from scripts.dev.gpu_check.training import SHORT_PARITY, expect_equal, run


def compiled(session: Session) -> str:
    """Count graphs and graph breaks of a compiled run in float64, and compare it with the uncompiled one."""
    expected = run(session, "eager", *SHORT_PARITY)
    counters.clear()
    found = expect_equal(run(session, "compiled", *SHORT_PARITY, "module.compile=true"), expected)
    breaks, graphs = Counter(counters["graph_break"]), counters["stats"]["unique_graphs"]
    expect(graphs > 0, "no graph was captured: nothing was compiled")
    expect(not breaks, f"{breaks.total()} graph breaks: {'; '.join(breaks)}")
    captured = counters["stats"]["calls_captured"]
    return f"{graphs} graphs of {captured} operations in all, no break; difference {found}"
