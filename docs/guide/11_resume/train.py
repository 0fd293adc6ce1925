"""Chapter 11: two processes are killed in the middle of saving a checkpoint; the run resumes, and nothing is lost."""

import contextlib
import io
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import ProcessException

from docs.guide.experiment import EPOCHS, STEPS_PER_EPOCH, batches, check_parity, chosen_bug, network, run_ranks, sgd

SAVE_EVERY, KILLED_AT = 4, 12  # steps; the kill comes while the checkpoint of step 12 is being written


def save(path: Path, state: dict[str, object], bug: str, is_killed: bool) -> None:
    """Write a checkpoint under a temporary name and rename it, so that the file is always a complete checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    data, half = file.getvalue(), len(file.getvalue()) // 2
    temporary = path if bug == "in_place" else path.with_suffix(f".{dist.get_rank()}")
    with temporary.open("wb", buffering=0) as target:
        target.write(data[:half])
        if is_killed:
            signal.raise_signal(signal.SIGKILL)  # as the kernel does when memory runs out
        target.write(data[half:])
    temporary.replace(path)


def train(path: Path, is_noisy: bool, bug: str, killed_at: int = 0) -> list[float]:
    """Train, from the checkpoint if there is one, and return the losses of all steps since the first start."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net, generator, first_step = network(), torch.Generator().manual_seed(rank), 0
    optimizer, losses = sgd(net), []
    if path.exists():
        state = torch.load(path)
        net.load_state_dict(state["net"])
        if bug != "optimizer":
            optimizer.load_state_dict(state["optimizer"])
        if bug != "random":
            generator.set_state(state["generators"][rank])
        first_step, losses = 0 if bug == "position" else state["step"], state["losses"]
    for step in range(first_step, first_step + EPOCHS * STEPS_PER_EPOCH - len(losses)):
        x, y = (part[rank::ranks] for part in batches(step // STEPS_PER_EPOCH)[step % STEPS_PER_EPOCH])
        noise = torch.randn(x.shape, dtype=x.dtype, generator=generator) if is_noisy else 0.0
        loss = F.cross_entropy(net(x + noise), y)
        optimizer.zero_grad()
        loss.backward()
        for tensor in [*[weight.grad for weight in net.parameters()], loss.detach()]:  # in place: also of `loss`
            dist.all_reduce(tensor)
            tensor /= ranks
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % SAVE_EVERY == 0:
            generators: list[torch.Tensor] = [torch.empty_like(generator.get_state()) for _ in range(ranks)]
            dist.all_gather(generators, generator.get_state())
            if bug == "every_rank":
                generators = [generator.get_state()] * ranks  # each rank saves its own, and the last one is kept
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            if rank == 0 or bug == "every_rank":
                save(path, state | {"losses": losses, "generators": generators}, bug, step + 1 == killed_at)
    return losses


def train_and_kill(path: Path, is_noisy: bool, bug: str) -> list[float]:
    with contextlib.suppress(ProcessException):
        run_ranks(train, 2, path, is_noisy, bug, KILLED_AT)
    assert torch.load(path)["step"] == KILLED_AT - SAVE_EVERY
    return run_ranks(train, 2, path, is_noisy, bug)[0]


if __name__ == "__main__":
    bug = chosen_bug("position", "optimizer", "in_place", "every_rank", "random")
    with tempfile.TemporaryDirectory() as folder:
        losses = train_and_kill(Path(folder) / "noisy.ckpt", True, bug)
        check_parity(losses, run_ranks(train, 2, Path(folder) / "whole.ckpt", True, "")[0])
        check_parity(train_and_kill(Path(folder) / "plain.ckpt", False, bug))
