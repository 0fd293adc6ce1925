"""The printed report: one line for each finding."""

import os
import socket
import sys

import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from src.doctor.finding import Finding


class Report:
    """Prints the findings of rank zero, and of the other ranks their problems.

    Args:
        rank: rank of this process, or 0 for a launcher whose ranks have not started.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._findings: list[Finding] = []

    def add(self, finding: Finding) -> None:
        """Print a finding at once: the later checks may take a minute."""
        self._findings.append(finding)
        if finding.ok and self._rank > 0:
            return
        word, style = ("ok", "green") if finding.ok else ("problem", "bold red")
        source = f"rank {self._rank} on {socket.gethostname()}: " if self._rank > 0 else ""
        line = Text.assemble((f"{word:<8}", style), f"{finding.name:<15}{source}{finding.text}")
        Console(soft_wrap=True).print(line)
        sys.stdout.flush()

    def close(self) -> None:
        """Print the number of problems.

        Raises:
            SystemExit: with code 1, if there is a problem.
        """
        problems = sum(not finding.ok for finding in self._findings)
        if self._rank == 0:
            print(f"{len(self._findings)} checks, {problems or 'no'} problem{'s' * (problems > 1)}")
        if problems and dist.is_initialized():  # closing a process group that hangs would hang as well
            sys.stdout.flush()
            os._exit(1)
        if problems:
            raise SystemExit(1)
