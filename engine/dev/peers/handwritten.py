"""A hand-written training loop for `engine.dev.bench`: no Lightning, no Hydra, the same work per step.

It has the network, images, order, augmentation, optimizer, schedule and log points of `train.py`, in float32. On
several processes (`torchrun --nproc-per-node=N -m engine.dev.peers.handwritten ...`) it uses DistributedDataParallel.
There is no host-device synchronization between log points.
"""

import csv

import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from engine.dev.peers.common import (
    Marks,
    arguments,
    augmented,
    batches_of_epoch,
    build_optimizer,
    join_process_group,
    memory_format_of,
    set_up,
)
from onecurve.process.groups import close_process_group


def main() -> None:
    options = arguments(__doc__).parse_args()
    marks = Marks(options.clock, options.log_every)
    rank, world, device = join_process_group()
    images, labels, net = set_up(options, device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True) if world > 1 else net
    optimizer, schedule = build_optimizer(list(model.parameters()), options.steps)
    layout = memory_format_of(options)
    rows, step = csv.writer(options.clock.with_suffix(".csv").open("w")), 0
    for epoch in range(options.steps):
        batches = batches_of_epoch(len(labels), options.batch, epoch).to(device)[:, rank::world]
        for index in batches:
            image = augmented(images, epoch, index).contiguous(memory_format=layout)
            loss = F.cross_entropy(model(image), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % options.log_every == 0:
                mean = loss.detach()
                if world > 1:
                    dist.all_reduce(mean)
                rows.writerow([step, float(mean) / world])
            if rank == 0:
                marks.step(step)
            if step == options.steps:
                close_process_group()
                return


if __name__ == "__main__":
    main()
