"""Every strategy and torch.compile in float64 against one CPU process, and strategies in bfloat16."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from torch._dynamo.utils import counters

from engine.dev.gpu_check.case import NotHere, Session, expect
from engine.dev.gpu_check.runs import SHORT_PARITY, TINY, expect_equal, middle, run

STRATEGIES = ["auto", "ddp", "ddp_spawn", "fsdp", "hsdp", "pipeline", "hybrid"]
MICRO_BATCHES = 4  # of the pipelines; each is a normalization group


def cpu_parity(session: Session) -> str:
    """Compare eight float64 steps of the default model with those of the CPU."""
    expected = run(replace(session, accelerator="cpu"), "cpu", *SHORT_PARITY)
    return f"difference {expect_equal(run(session, 'device', *SHORT_PARITY), expected)}"


def strategy_check(strategy: str, devices: int | list[int]) -> Callable[[Session], str]:
    """Return the check of a strategy on a number of devices, or on listed GPUs.

    Batch normalization has one group, or one per micro-batch, so that the ranks share their statistics.
    """

    def check(session: Session) -> str:
        options = [f"strategy={strategy}", *_options(strategy, devices)]
        groups = groups_of(strategy)
        expected = run(replace(session, accelerator="cpu"), "cpu", *SHORT_PARITY, groups)
        found = expect_equal(run(session, "float64", *SHORT_PARITY, groups, *options, devices=devices), expected)
        half = ["model.width=8", *TINY, "trainer.precision=bf16-mixed", "trainer.max_epochs=2", "test=false", groups]
        speed = middle(run(session, "bfloat16", *half, *options, devices=devices), "throughput/step_ms")
        return f"difference {found} in float64; {speed:.0f} ms per tiny step in bfloat16"

    return check


def groups_of(strategy: str) -> str:
    """Return the option of one normalization group, or of one for each micro-batch of a pipeline."""
    return f"virtual_ranks={MICRO_BATCHES if strategy in ('pipeline', 'hybrid') else 1}"


def _options(strategy: str, devices: int | list[int]) -> list[str]:
    """Return the options that fit the strategy to one device."""
    if devices != 1:
        return []
    return {"hsdp": ["strategy.replicas=1"], "hybrid": ["strategy.stages=1"]}.get(strategy, [])


def data_parallel(session: Session) -> str:
    """Train under `dp`, whose batch statistics are those of a replica, so that no other run equals it."""
    if not session.on_gpu or session.devices < 2:
        raise NotHere("dp needs two GPUs")
    for precision in ("32-true", "bf16-mixed"):
        options = [*TINY, "strategy=dp", f"trainer.precision={precision}", "trainer.max_epochs=2"]
        result = run(session, precision, *options, devices=session.devices)
    return f"{middle(result, 'throughput/step_ms'):.0f} ms per tiny step in bfloat16"


def compiled_ranks(devices: int) -> Callable[[Session], str]:
    """Return the check that compiled ranks agree in float64 with one process on the CPU, and end."""

    def check(session: Session) -> str:
        options = [*SHORT_PARITY, groups_of("ddp")]
        expected = run(replace(session, accelerator="cpu"), "cpu", *options)
        found = run(session, "compiled", *options, "strategy=ddp", "module.compile=true", devices=devices)
        return f"difference {expect_equal(found, expected)} in float64"

    return check


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
