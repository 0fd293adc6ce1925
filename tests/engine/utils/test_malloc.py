"""A process reuses large freed blocks instead of asking the kernel for new ones; not so under FSDP."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from src.engine.utils.process import map_large_blocks, tune_malloc

kept = tune_malloc() if sys.argv[1] != "leave" else None
if sys.argv[1] == "map again":
    kept = map_large_blocks()
net = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)])
inputs = torch.ones(300_000, 32)  # 37 MB between layers
for step in range(6):
    if step == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    net(inputs).sum().backward()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc's malloc is tuned")
def test_freed_blocks_are_reused() -> None:
    def faults(how: str) -> tuple[str, int]:
        output = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True).stdout
        return output.split()[0], int(output.split()[1])

    kept, few = faults("keep")
    assert kept == "True"
    again, many = faults("map again")
    assert again == "True"
    assert few * 3 < min(many, faults("leave")[1])
