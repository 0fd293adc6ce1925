"""A hand-written pipeline of two stages on torch.distributed.pipelining, for `engine.dev.bench`.

`torchrun --nproc-per-node=2 -m engine.dev.peers.handwritten_pipeline ...` cuts the network and the batch as `train.py`
does, with images, optimizer, learning rates and log points of `handwritten.py`. Only the first stage's rank prepares
images, and only the last stage's rank computes the loss.
"""

import csv

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from engine.dev.peers.common import (
    Marks,
    arguments,
    augmented,
    batches_of_epoch,
    build_optimizer,
    join_process_group,
    set_up,
)
from onecurve.process.groups import close_process_group

_BLOCKS = 2  # of the first stage: the cut is before `layer2`


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--microbatches", type=int, default=8)
    options = parser.parse_args()
    marks = Marks(options.clock, options.log_every)
    rank, world, device = join_process_group()
    images, labels, net = set_up(options, device)
    net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # the only one that stages can send
    part = nn.Sequential(*list(net.children())[slice(_BLOCKS) if rank == 0 else slice(_BLOCKS, None)])

    def loss_of(outputs: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(outputs, label, reduction="sum") / options.batch

    stage = PipelineStage(part, rank, world, device)
    schedule = Schedule1F1B(stage, options.microbatches, loss_fn=loss_of, scale_grads=False)
    optimizer, factors = build_optimizer(list(part.parameters()), options.steps)
    rows = csv.writer(options.clock.with_suffix(f".{rank}.csv").open("w"))
    for step in range(1, options.steps + 1):
        epoch, number = divmod(step - 1, len(labels) // options.batch)
        if number == 0:
            batches = batches_of_epoch(len(labels), options.batch, epoch).to(device)
            batches = batches.unflatten(1, (-1, options.microbatches)).transpose(1, 2).flatten(1)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(augmented(images, epoch, batches[number]))
        else:
            schedule.step(target=labels[batches[number]], losses=losses)
        optimizer.step()
        factors.step()
        if losses and step % options.log_every == 0:
            rows.writerow([step, float(torch.stack(losses).detach().sum())])
        if rank == 0:
            marks.step(step)
    close_process_group()


if __name__ == "__main__":
    main()
