"""A short run of the default model, and the test suite's own check for host-device synchronizations."""

import sys
from collections.abc import Callable

from scripts.dev.gpu_check.case import Session, expect
from scripts.dev.gpu_check.process import last_line, run_limited
from scripts.dev.gpu_check.training import TINY, middle, run


def short_run(devices: int) -> Callable[[Session], str]:
    """Return the check that trains the default model for two epochs; on 20,000 images on GPUs."""

    def check(session: Session) -> str:
        large, tiny = ["data.source.train_size=20000", "data.source.test_size=2000"], ["model.width=4", *TINY]
        size = large if session.on_gpu else tiny
        result = run(session, "run", *size, "trainer.max_epochs=2", devices=devices)
        speed, memory = (middle(result, f"throughput/{name}") for name in ("samples_per_sec", "peak_memory_mib"))
        accuracy = result.metrics["test/acc"]
        expect(accuracy > 0.7 or not session.on_gpu, f"accuracy {accuracy:.3f} after two epochs; a CPU has 0.80")
        return f"{speed:,.0f} images/s, {memory:.0f} MiB, accuracy {accuracy:.3f}"

    return check


def waits(session: Session) -> str:
    """Run tests/test_synchronizations.py: on a GPU torch itself raises at each synchronization."""
    chosen = "on_a_gpu" if session.on_gpu else "between_log_points and default"
    log = session.folder / "tests.log"
    tests = [sys.executable, "-m", "pytest", "tests/test_synchronizations.py", "-k", chosen, "--durations=0"]
    code = run_limited(tests, log, 150)
    expect(code == 0 and " passed" in last_line(log), f"pytest ended with {code}: {last_line(log)}")
    return last_line(log).partition(" in ")[0]
