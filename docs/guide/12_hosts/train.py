"""Chapter 12: several hosts. Two torchrun agents stand for two hosts; each starts two processes."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from docs.guide.experiment import EPOCHS, batches, check_parity, chosen_bug, network, sgd

SECONDS = 10  # how long a collective waits for the other ranks; by default half an hour under gloo


def launch(bug: str, losses: str) -> None:
    """Run this file under torchrun on "two hosts", as one would type it on each of them.

    Raises:
        SystemExit: if a process of a host failed.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # a free one
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "-m", "docs.guide.12_hosts.train"]
    environment = os.environ | {"LOSSES": losses, "OMP_NUM_THREADS": "1"}
    hosts = [subprocess.Popen([*command, *([f"--bug={bug}"] if bug else [])], env=environment) for _ in range(2)]
    exit_codes = [host.wait() for host in hosts]
    if any(exit_codes):
        raise SystemExit("a host failed")


def train(bug: str) -> None:
    """Train on one of the four processes; torchrun has set the environment variables."""
    rank, local_rank, ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    print(f"host {os.environ['GROUP_RANK']}: RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={ranks}", flush=True)
    dist.init_process_group("gloo")  # address, rank and world size are in the environment
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))

    part = local_rank if bug == "local_rank" else rank  # LOCAL_RANK is for the GPU, RANK for the images
    net, losses = network(), []
    optimizer = sgd(net)
    for epoch in range(EPOCHS):
        for x, y in batches(epoch):
            loss = F.cross_entropy(net(x[part::ranks]), y[part::ranks])
            optimizer.zero_grad()
            loss.backward()
            if bug == "stuck" and rank == 3:
                time.sleep(3600)  # for example, a file system does not answer
            weights = list(net.parameters())
            gradients, mean_loss = parameters_to_vector([weight.grad for weight in weights]), loss.detach().clone()
            for tensor in (mean_loss, gradients) if bug == "order" and rank == 3 else (gradients, mean_loss):
                tensor /= ranks
                dist.all_reduce(tensor, group=group)
            vector_to_parameters(gradients, [weight.grad for weight in weights])
            optimizer.step()
            losses.append(mean_loss.item())
    if rank == 0:
        torch.save(losses, os.environ["LOSSES"])
    dist.destroy_process_group()


if __name__ == "__main__":
    bug = chosen_bug("local_rank", "order", "stuck")
    if "RANK" in os.environ:
        train(bug)
    else:
        with tempfile.TemporaryDirectory() as folder:
            launch(bug, f"{folder}/losses.pt")
            check_parity(torch.load(Path(folder) / "losses.pt"))
