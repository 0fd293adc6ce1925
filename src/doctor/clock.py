"""The clock of this host, and the clocks of all hosts against each other."""

import time
from pathlib import Path

from omegaconf import DictConfig

from src.utils.errors import UserError

_DAY = 86_400
_MAX_DIFFERENCE = 2.0  # seconds


def check_clock(cfg: DictConfig) -> str:
    """Check that the clock is not behind this project's files; a wrong clock makes TLS connections fail."""
    now, newest = time.time(), max(file.stat().st_mtime for file in Path(__file__).parent.glob("*.py"))
    if now < newest - _DAY:
        raise UserError(
            f"the clock of this host ({_date(now)}) is behind the date of the project's files ({_date(newest)}): "
            "set it with `timedatectl set-ntp true`"
        )
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))


def check_difference(seconds: float) -> str:
    """Check the difference between the clocks of the hosts: logs and file times are compared across hosts."""
    if seconds > _MAX_DIFFERENCE:
        raise UserError(f"the clocks of the hosts differ by {seconds:.1f} s: start NTP on all (chronyd, or timesyncd)")
    return f"the clocks of all processes differ by at most {seconds:.3f} s"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
