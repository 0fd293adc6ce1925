"""Train a network: `python train.py strategy=ddp trainer.devices=4`; `python train.py --help` lists the options.

`onecurve.main` composes the configuration from conf/ and the command line, makes the run's folder, starts the ranks,
and records how they end. Every rank calls `run`, which the option `launch.function` names, with the same configuration.
"""

import sys

try:
    import onecurve
except ModuleNotFoundError:
    sys.exit(f"error: {sys.executable} has no onecurve: run `make install`, then `source .venv/bin/activate`")
from omegaconf import DictConfig


def run(cfg: DictConfig) -> "onecurve.Trainer":
    """Build trainer, module and data, then fit, test and predict, on one rank of the run."""
    trainer = onecurve.build_trainer(cfg)  # a lightning.Trainer; it seeds the generators of the initial weights
    module = onecurve.build_module(cfg, trainer)  # the LightningModule of conf/module
    data = onecurve.build(cfg.data)  # the LightningDataModule of conf/data; the trainer divides its batches among ranks

    # Steps before training go here: every rank must take them.
    if cfg.fit:
        trainer.fit(module, datamodule=data, ckpt_path=cfg.ckpt_path)

    weights = None if cfg.fit else cfg.ckpt_path  # None for those that training has left
    if cfg.fit and cfg.test == "best":
        weights = "best"
    if cfg.test:
        trainer.test(module, datamodule=data, ckpt_path=weights, verbose=False)
    if cfg.predict:
        trainer.predict(module, datamodule=data, ckpt_path=weights, return_predictions=False)

    # Steps after it go here, such as an export: `if trainer.is_global_zero:` takes them on rank zero alone. What must
    # follow an error or a signal too belongs in `try: ... finally:` around the steps above.
    return trainer


if __name__ == "__main__":
    sys.exit(onecurve.main())
