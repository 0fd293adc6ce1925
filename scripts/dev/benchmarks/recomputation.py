"""Measure what module.recompute=blocks costs in time and saves in memory, for the vision transformer of conf/model.

One process trains both networks in turn on random images: forward pass, loss, backward pass and SGD. The time is the
processor time of the main thread, so that other work on the machine changes it little.
"""

import argparse
import tempfile
import time
from statistics import median
from typing import Any

import hydra
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from scripts.dev.benchmarks.programs import ROOT
from src.run.experiment import assemble
from src.sweeps.resolvers import register_resolvers

OPTIONS = ["data=shapes", "trainer.accelerator=cpu", "trainer.devices=1", "logger=none"]


def saved_bytes(net: nn.Module, images: Tensor) -> int:
    """Return the bytes that the graph of a forward pass keeps for the backward pass, except parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    storages: dict[int, int] = {}
    kept = []  # a storage that is freed could give its address to another one

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        net(images)
    return sum(storages.values())


def build(recompute: str, *options: str) -> Any:
    """Return the LightningModule of the default configuration with a network of `options`."""
    with tempfile.TemporaryDirectory() as folder, hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        overrides = [*OPTIONS, *options, f"module.recompute={recompute}", f"run_dir={folder}"]
        cfg = hydra.compose("train", overrides)
        OmegaConf.resolve(cfg)
        return assemble(cfg)[1]


def seconds_per_step(module: Any, images: Tensor, steps: int) -> float:
    """Return the mean processor time of a training step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    target = torch.arange(len(images)) % 10
    start = time.thread_time()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(module(images), target).backward()
        optimizer.step()
    return (time.thread_time() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps per round and network")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--model", default="vit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    register_resolvers()
    images = torch.rand(options.batch, 3, 32, 32)
    modules = {name: build(name, f"model={options.model}") for name in ("none", "blocks")}
    mib = {name: saved_bytes(module, images) / 2**20 for name, module in modules.items()}
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    for module in modules.values():
        seconds_per_step(module, images, 1)
    for number in range(options.rounds):
        for name in list(modules)[:: -1 if number % 2 else 1]:
            seconds[name].append(seconds_per_step(modules[name], images, options.steps))
    ratios = [blocks / none for none, blocks in zip(*seconds.values(), strict=True)]
    for name, values in seconds.items():
        print(f"{name:7} {median(values):.3f} s ({min(values):.3f} to {max(values):.3f}), saves {mib[name]:.0f} MiB")
    print(f"ratio   {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {mib['blocks'] / mib['none']:.3f}")


if __name__ == "__main__":
    main()
