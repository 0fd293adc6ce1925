"""A hand-written pipeline on torch.distributed.pipelining, for `scripts.dev.bench`: no Lightning, no Hydra.

`torchrun --nproc-per-node=N -m scripts.dev.peers.handwritten_pipeline ...` splits the network and the batch as
`train.py` does, with images, optimizer, learning rates and log points of `handwritten.py`. Only the first stage's rank
prepares images, and only the last stage's rank computes the loss.
"""

import csv
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.dev.peers.common import (
    Marks,
    arguments,
    augmented,
    batches_of_epoch,
    build_optimizer,
    join_process_group,
    set_up,
)
from src.engine.parallel.pipeline.blocks import ordered_blocks
from src.engine.parallel.pipeline.schedules import SCHEDULES
from src.engine.parallel.pipeline.split import cut
from src.engine.parallel.pipeline.stage import Stage, build_stage, remove_other_stages, stage_inputs, stage_shapes
from src.engine.utils.process_group import close_process_group


def pipeline(
    net: nn.Module, name: str, microbatches: int, batch: int, rank: int, world: int, device: torch.device, loss: Any
) -> tuple[Any, list[nn.Module], list[int]]:
    """Return the schedule, this rank's stages, and the rank of each stage."""
    spec, images = SCHEDULES[name], torch.rand(batch // microbatches, 3, 32, 32, device=device)
    stage_to_rank = spec.stage_to_rank(world)
    parts = cut(ordered_blocks(net, images), len(stage_to_rank), "auto")
    own = [number for number, owner in enumerate(stage_to_rank) if owner == rank]
    modules = {number: Stage(net, parts[number], stage_inputs(parts, number)) for number in own}
    remove_other_stages(net, parts, own)
    stages = [build_stage(module, number, stage_shapes(parts), None, device) for number, module in modules.items()]
    stage_or_stages: Any = stages[0] if spec.stages_per_rank == 1 else stages
    return (
        spec.schedule(stage_or_stages, microbatches, loss_fn=loss, scale_grads=False),
        list(modules.values()),
        stage_to_rank,
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    options = parser.parse_args()
    marks = Marks(options.clock, options.log_every)
    rank, world, device = join_process_group()
    images, labels, net = set_up(options, device)

    def loss_of(output: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(output, label, reduction="sum") / options.batch

    schedule, modules, stage_to_rank = pipeline(
        net, options.schedule, options.microbatches, options.batch, rank, world, device, loss_of
    )
    weights: list[Tensor] = [weight for module in modules for weight in module.parameters()]
    optimizer, factors = build_optimizer(weights, options.steps)
    rows, step = csv.writer(options.clock.with_suffix(f".{rank}.csv").open("w")), 0
    first, last = rank == stage_to_rank[0], rank == stage_to_rank[-1]
    while step < options.steps:
        epoch, number = divmod(step, len(labels) // options.batch)
        if number == 0:
            batches = batches_of_epoch(len(labels), options.batch, epoch).to(device)
            batches = batches.unflatten(1, (-1, options.microbatches)).transpose(1, 2).flatten(1)
        inputs: tuple[Tensor, ...] = ()
        last_stage: dict[str, Any] = {}
        if first:
            inputs = (augmented(images, epoch, batches[number]),)
        if last:
            last_stage = {"target": labels[batches[number]], "losses": []}
        optimizer.zero_grad()
        schedule.step(*inputs, **last_stage)
        optimizer.step()
        factors.step()
        step += 1
        if step % options.log_every == 0 and last:
            rows.writerow([step, float(torch.stack(last_stage["losses"]).detach().sum())])
        if rank == 0:
            marks.step(step)
    close_process_group()


if __name__ == "__main__":
    main()
