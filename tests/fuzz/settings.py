"""How Hypothesis draws: training runs take seconds, and every run of the suite draws the same cases."""

from hypothesis import HealthCheck, settings

SETTINGS = settings(
    deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck), report_multiple_bugs=False
)
