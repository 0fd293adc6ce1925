"""Count the operations of one training step by phase: each is at least one kernel launch on a GPU.

    python -m scripts.dev.benchmarks.launches experiment=vit +optimizer.fused=true

The step runs eagerly on a CPU, on synthetic shapes. Views, allocations, marks of the profiler and reads
on the host are not counted, since they launch no kernel.
On a GPU torch's optimizers are fused by default; `+optimizer.fused=true` counts that here. A step at a log point, with
its few more operations, is not counted.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from src.run.experiment import assemble
from src.sweeps.resolvers import register_resolvers

ROOT = Path(__file__).parents[3]
OPTIONS = ["data=shapes", "data.source.test_size=100", "trainer.max_steps=4", "trainer.max_epochs=null"]
OPTIONS += ["trainer.limit_val_batches=0", "trainer.accelerator=cpu", "trainer.devices=1", "logger=none"]
OPTIONS += ["trainer.log_every_n_steps=1000", "trainer.enable_progress_bar=false", "callbacks.throughput=null"]
OPTIONS += ["callbacks.best=null", "callbacks.checkpoint=null"]
COUNTED_STEP = 2  # neither the first, which creates the optimizer's state, nor the last, which is logged
NO_KERNEL = set(
    "_local_scalar_dense _record_function_enter_new _record_function_exit "
    "_reshape_alias _unsafe_view alias as_strided chunk detach diagonal empty empty_like empty_strided expand "
    "lift_fresh new_empty new_empty_strided permute reshape select slice split split_with_sizes squeeze t transpose "
    "unbind unfold unsqueeze view".split()
)


class OperationCounter(TorchDispatchMode):
    """Counts the operations by name, in a counter per phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.counts = "", dict[str, Counter[str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_KERNEL:
            self.counts.setdefault(self.phase, Counter())[name] += 1
        return func(*args, **(kwargs or {}))


class StepPhases(L.Callback):
    """Counts the operations of one step and of the fetch of its batch."""

    def __init__(self) -> None:
        self.counter = OperationCounter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == COUNTED_STEP:
            self.counter.phase = "data"
            self.counter.__enter__()
        elif trainer.global_step == COUNTED_STEP + 1:
            self.counter.__exit__(None, None, None)

    def on_train_batch_start(self, *_: Any) -> None:
        self.counter.phase = "forward and loss"

    def on_before_backward(self, *_: Any) -> None:
        self.counter.phase = "backward"

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.counter.phase = "optimizer"


def count_operations(overrides: list[str]) -> dict[str, Counter[str]]:
    """Return the operations of one step by phase and name."""
    register_resolvers()
    with tempfile.TemporaryDirectory() as folder, hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra.compose("train", [*OPTIONS, f"data.root={folder}", f"run_dir={folder}/run", *overrides])
        cfg.data.source.train_size = 5 * cfg.data.batch_size + 200
        OmegaConf.resolve(cfg)
        trainer, module, data = assemble(cfg)
        trainer.callbacks.append(phases := StepPhases())
        trainer.fit(module, datamodule=data)
    return phases.counter.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--names", type=int, default=8, help="number of operations to name per phase")
    options, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    counts = count_operations(overrides)
    for phase, names in counts.items():
        common = ", ".join(f"{name} {count}" for name, count in names.most_common(options.names))
        sys.stdout.write(f"{phase:17}{sum(names.values()):5}  {common}\n")
    sys.stdout.write(f"{'step':17}{sum(sum(names.values()) for names in counts.values()):5}\n")


if __name__ == "__main__":
    main()
