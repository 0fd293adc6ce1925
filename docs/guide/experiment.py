"""The experiment of the guide: its data, its network and its training on one process.

Every chapter trains this experiment in another way, and checks that it gets the same losses.
"""

import argparse
import logging
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

logging.getLogger("torch.multiprocessing.spawn").setLevel(
    logging.ERROR
)  # a rank that fails ends the others, as it should
SEED = 0
IMAGES, TEST_IMAGES = 120, 50
BATCH = 24  # images per optimizer step, over all processes
STEPS_PER_EPOCH = IMAGES // BATCH
EPOCHS = 4
RATE, MOMENTUM = 0.05, 0.9
TOLERANCE = 1e-9  # of relative differences between two runs in float64


def images(count: int = IMAGES, seed: int = SEED) -> TensorDataset:
    """Return (3, 8, 8) images of ten classes, which are ten fixed patterns with noise, and their labels."""
    patterns = torch.randn(10, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))
    generator = torch.Generator().manual_seed(seed + 1)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randn(count, 3, 8, 8, dtype=torch.float64, generator=generator)
    return TensorDataset(patterns[labels] + noise, labels)


def network(normalize: bool = False) -> nn.Sequential:
    """Return a network of four blocks with the weights of the seed; it maps (n, 3, 8, 8) images to (n, 10) logits."""
    float64: Any = {"dtype": torch.float64}

    def norm(channels: int) -> list[nn.Module]:
        return [nn.BatchNorm2d(channels, **float64)] if normalize else []

    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, **float64), *norm(8), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1, **float64), *norm(16), nn.ReLU(), nn.Flatten()),
            nn.Sequential(nn.Linear(256, 32, **float64), nn.ReLU()),
            nn.Linear(32, 10, **float64),
        )


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), RATE, MOMENTUM)


def order(epoch: int) -> Tensor:
    """Return the (IMAGES,) positions of an epoch in the order that torch's DistributedSampler draws, too."""
    return torch.randperm(IMAGES, generator=torch.Generator().manual_seed(SEED + epoch))


def batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
    """Return the global batches of an epoch: pairs of (BATCH, 3, 8, 8) images and (BATCH,) labels."""
    x, y = images().tensors
    return [(x[rows], y[rows]) for rows in order(epoch).split(BATCH)]


def train_alone(normalize: bool = False) -> list[float]:
    """Train on one process, as chapter 0 does, and return the loss of each step."""
    net, losses = network(normalize), []
    optimizer = sgd(net)
    for epoch in range(EPOCHS):
        for x, y in batches(epoch):
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def check_parity(losses: Sequence[float], expected: Sequence[float] | None = None) -> None:
    """Print the losses of a run beside those of one process, by default those of `train_alone()`.

    Raises:
        SystemExit: if a loss differs by more than the tolerance.
    """
    expected = train_alone() if expected is None else expected
    assert len(losses) == len(expected), f"{len(losses)} losses instead of {len(expected)}"
    differences = [abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True)]
    print("  step  one process     this run  difference")
    for step in sorted({0, 1, 2, len(losses) // 2, len(losses) - 1}):
        print(f"  {step + 1:4} {expected[step]:12.9f} {losses[step]:12.9f} {differences[step]:11.0e}")
    wrong = [step + 1 for step, difference in enumerate(differences) if not difference < TOLERANCE]
    if wrong:
        raise SystemExit(f"ANOTHER EXPERIMENT: the loss of step {wrong[0]} differs by {differences[wrong[0] - 1]:.1e}")
    print(f"same experiment: all {len(losses)} losses agree to {TOLERANCE:.0e}")


def chosen_bug(*names: str) -> str:
    """Return the mistake that the option `--bug` asks for, or an empty string."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", choices=names, default="", help="run with this mistake")
    return parser.parse_args().bug


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, seconds: float = 60) -> list[Any]:
    """Call a function in each of several processes, which share a gloo process group; return what each returns.

    Args:
        function: called with `arguments`; it is a function of a module, so that a new process can import it.
        ranks: the number of processes.
        arguments: what the function gets.
        seconds: how long a collective waits for the other ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A fork server imports torch once, where spawned processes would import it one by one.
        mp.start_processes(_run_rank, (function, ranks, arguments, folder, seconds), ranks, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _run_rank(
    rank: int, function: Callable[..., Any], ranks: int, arguments: tuple[Any, ...], folder: str, seconds: float
) -> None:
    torch.set_num_threads(1)  # several processes with several threads each slow each other down
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, timedelta(seconds=seconds), world_size=ranks, rank=rank)
    torch.save(function(*arguments), Path(folder) / f"{rank}.pt")
    dist.barrier()  # a rank that left early would break the last collective of the others
    dist.destroy_process_group()
