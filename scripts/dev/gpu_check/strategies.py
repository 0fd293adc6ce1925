"""Every strategy in float64 against one CPU process, and then in bfloat16."""

from collections.abc import Callable
from dataclasses import replace

from scripts.dev.gpu_check.case import NotHere, Session
from scripts.dev.gpu_check.training import SHORT_PARITY, TINY, expect_equal, middle, run

STRATEGIES = ["auto", "ddp", "ddp_spawn", "fsdp", "hsdp", "pipeline", "hybrid"]
PIPELINES = ["pipeline", "hybrid"]
MICRO_BATCHES = 4  # batch normalization sees them one by one, as when one process accumulates them
MOST_STAGES = 4  # blocks of the default model


def strategy_check(strategy: str, devices: int | list[int]) -> Callable[[Session], str]:
    """Return the check of a strategy on a number of devices, or on listed GPUs."""

    def check(session: Session) -> str:
        options = [f"strategy={strategy}", *_options(strategy, devices)]
        accumulate = MICRO_BATCHES if strategy in PIPELINES else 1
        cpu = replace(session, accelerator="cpu")
        expected = run(cpu, "cpu", *SHORT_PARITY, f"trainer.accumulate_grad_batches={accumulate}")
        found = expect_equal(run(session, "float64", *SHORT_PARITY, *options, devices=devices), expected)
        half = ["model.width=8", *TINY, "trainer.precision=bf16-mixed", "trainer.max_epochs=2", "test=false"]
        speed = middle(run(session, "bfloat16", *half, *options, devices=devices), "throughput/step_ms")
        return f"difference {found} in float64; {speed:.0f} ms per tiny step in bfloat16"

    return check


def _options(strategy: str, devices: int | list[int]) -> list[str]:
    """Return the options that fit the strategy to one device."""
    if devices != 1:
        return []
    return {"hsdp": ["strategy.replicas=1"], "hybrid": ["strategy.stages=1"]}.get(strategy, [])


def data_parallel(session: Session) -> str:
    """Train under `dp`, whose batch statistics are those of a replica, so that no other run equals it."""
    session.need_gpu("dp needs two GPUs")
    if session.devices < 2:
        raise NotHere("dp needs two GPUs")
    for precision in ("32-true", "bf16-mixed"):
        options = [*TINY, "strategy=dp", f"trainer.precision={precision}", "trainer.max_epochs=2"]
        result = run(session, precision, *options, devices=session.devices)
    return f"{middle(result, 'throughput/step_ms'):.0f} ms per tiny step in bfloat16"


def device_counts(strategy: str, devices: int) -> int:
    """Return the number of devices on which a strategy can use all of them."""
    return min(devices, MOST_STAGES) if strategy == "pipeline" else devices
