"""Report at the end of a test session: wall time per folder, and unexpected skips."""

import time
from collections import defaultdict

import pytest

ALLOWED_SKIPS = {
    "tests/template/data/test_cifar.py::test_reads_the_real_images": "CIFAR-10 is not part of the project",
    "tests/engine/gpu/test_dry_gpu.py": "there is no C++ compiler, or another torch than the stubs are for",
    "tests/engine/config/test_refusals.py::test_refused_by_the_command_line[trainer.accelerator=gpu": "there is a GPU",
    "tests/engine/extras/report/test_pages.py": "Chromium is not installed",
    "tests/engine/faults/test_elastic_trials.py": "SLURM is not installed, or there are no network namespaces",
    "tests/engine/launch/test_slurm.py": "SLURM is not installed",
    "tests/engine/launch/test_two_hosts.py": "network namespaces take root, and iproute2",
    "tests/engine/data/test_streaming_libraries.py": "make test-libraries installs the library",
    "tests/engine/run/test_libraries.py": "make test-libraries installs the library",
    "tests/engine/test_canaries.py::test_torch_still_records_a_stack_trace_to_seed_an_unused_device": "there is a GPU",
    "tests/scripts/test_export.py::test_exports_to_onnx": "ONNX is not installed",
    "tests/engine/test_synchronizations.py::test_no_synchronization_on_a_gpu": "there is no GPU",
    "tests/template/models/test_classifier.py::test_compiled_network_trains_alike": "there is no C++ compiler",
}


class SessionReport:
    """A pytest plugin that sums the seconds of each folder, and collects skips that are not on the list."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seconds: dict[str, float] = defaultdict(float)
        self.unexpected_skips: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = report.nodeid.partition("::")[0].rpartition("/")[0]
        self.seconds[folder] += report.duration
        if report.skipped and not report.nodeid.startswith(tuple(ALLOWED_SKIPS)):
            self.unexpected_skips.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected_skips:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("wall time")
        for folder, seconds in sorted(self.seconds.items(), key=lambda row: -row[1]):
            terminalreporter.write_line(f"{seconds:7.1f} s  {folder}")
        terminalreporter.write_line(f"{time.monotonic() - self.began:7.1f} s  in all")
        if self.unexpected_skips:
            terminalreporter.write_line(f"skipped, but not on the list in {__file__}: {self.unexpected_skips}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SessionReport(), "wall time and skips")
