"""Settings of Hypothesis for tests that take seconds per case."""

from hypothesis import HealthCheck, settings

SETTINGS = settings(
    deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck), report_multiple_bugs=False
)
