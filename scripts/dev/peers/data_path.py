"""Loader and augmentation without a network, for `scripts.dev.bench`.

`--path ours` is this template's DataModule, `--path pil` the data path of tutorials (`pil_pipeline.py`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf

from scripts.dev.peers.handwritten import arguments
from scripts.dev.peers.marks import Marks
from scripts.dev.peers.pil_pipeline import loader
from src.run.experiment import assemble
from src.sweeps.resolvers import register_resolvers
from src.utils.malloc import tune_malloc


def ours(folder: Path, batch: int, scratch: Path) -> Iterator[Any]:
    """Yield the batches that Lightning passes to `training_step`."""
    with hydra.initialize_config_dir(str(Path(__file__).parents[3] / "conf"), version_base="1.3"):
        settings = [f"data.root={folder}", f"data.batch_size={batch}", f"run_dir={scratch}", "logger=none", "model=mlp"]
        cfg = hydra.compose("train", [*settings, "trainer.devices=1", "trainer.enable_progress_bar=false"])
    OmegaConf.resolve(cfg)
    trainer, module, data = assemble(cfg)
    data.trainer, trainer.training = trainer, True
    trainer.strategy._lightning_module = module
    module.to(trainer.strategy.root_device)
    data.setup("fit")
    for fetched in data.train_dataloader():
        yield data.on_after_batch_transfer(data.transfer_batch_to_device(fetched, trainer.strategy.root_device, 0), 0)


def pil(folder: Path, batch: int, scratch: Path) -> Iterator[Any]:
    """Yield batches that are loaded image by image."""
    yield from loader(folder, batch)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--path", choices=["ours", "pil"], default="ours")
    options = parser.parse_args()
    register_resolvers()
    tune_malloc()
    marks = Marks(options.clock, options.log_every)
    batches = {"ours": ours, "pil": pil}[options.path](options.data, options.batch, options.clock.parent)
    for step, _ in enumerate(batches, start=1):
        marks.step(step)
        if step == options.steps:
            break


if __name__ == "__main__":
    main()
