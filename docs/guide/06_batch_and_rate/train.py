"""Chapter 6: the same batch from micro-batches on two processes, and float16 with a loss scale that ranks share."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from docs.guide.experiment import BATCH, EPOCHS, check_parity, chosen_bug, images, network, order, run_ranks, sgd


def average(tensors: list[Tensor]) -> None:
    """Replace each tensor by its mean over the ranks."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def train(micro_batches: int, dtype: torch.dtype, scale: float, bug: str) -> tuple[list[float], list[float]]:
    """Return the loss and the loss scale of each step; with weights in float32, layers compute in float16."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    is_mixed = dtype == torch.float32
    net, losses, scales = network().to(dtype), [], []
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu", init_scale=scale, enabled=is_mixed)
    x, y = images().tensors
    global_batch = BATCH * ranks if bug == "batch_per_process" else BATCH
    for rows in [rows for epoch in range(EPOCHS) for rows in order(epoch).split(global_batch)]:
        optimizer.zero_grad()
        mean_loss = torch.zeros((), dtype=dtype)
        for micro_batch in rows[rank::ranks].tensor_split(micro_batches):
            with torch.autocast("cpu", torch.float16, enabled=is_mixed):
                loss = F.cross_entropy(net(x[micro_batch].to(dtype)), y[micro_batch])
            mean_loss += loss.detach() / micro_batches
            scaler.scale(loss if bug == "undivided" else loss / micro_batches).backward()  # gradients are added
        if bug == "scaler" and is_mixed:
            scaler.unscale_(optimizer)  # it looks for infinite gradients, here those of this rank only
        average([weight.grad for weight in net.parameters()])  # once per step, not once per micro-batch
        scaler.step(optimizer)  # it skips the step if a gradient is infinite
        scaler.update()  # and then halves the scale
        average([mean_loss])
        losses.append(mean_loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def print_scaling_rules() -> None:
    """Train eight epochs with two batches on one process, and print the loss of all images afterwards."""
    x, y = images().tensors
    for batch, factor in [(24, 1.0), (60, 1.0), (60, 2.5**0.5), (60, 2.5)]:
        net = network()
        optimizer = sgd(net)
        optimizer.param_groups[0]["lr"] *= factor
        for rows in [rows for epoch in range(8) for rows in order(epoch).split(batch)]:
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
        print(f"batch {batch}, learning rate {factor:.2f} x 0.05: loss {F.cross_entropy(net(x), y).item():.3f}")


def run_rank(bug: str) -> list[tuple[list[float], list[float]]]:
    runs = [(3, torch.float64, 1.0), (1, torch.float32, 2.0**16), (1, torch.float32, 2.0**19)]
    return [train(*run, bug) for run in runs]


if __name__ == "__main__":
    bug = chosen_bug("undivided", "batch_per_process", "scaler")
    torch.set_num_threads(1)
    print_scaling_rules()
    first_rank, second_rank = run_ranks(run_rank, 2, bug)
    (losses, _), (mixed_losses, _), (skipping_losses, scales) = first_rank
    other_scales = second_rank[2][1]
    difference = max(abs(mixed / loss - 1) for mixed, loss in zip(mixed_losses, losses, strict=True))
    print(f"float16, scale 65536: the losses differ from float64 by {difference:.1e} at most")
    print(f"float16, scale 524288: after step 1 the ranks have the scales {scales[0]:.0f} and {other_scales[0]:.0f}")
    print("the losses of the first steps:", ", ".join(f"{loss:.3f}" for loss in skipping_losses[:3]))
    if scales != other_scales:
        raise SystemExit("OUT OF STEP: the loss scales of the ranks differ")
    print("float64, 2 processes x 3 micro-batches x 4 images:")
    check_parity(losses)
    assert difference < 0.01, "float16 is far from float64"
