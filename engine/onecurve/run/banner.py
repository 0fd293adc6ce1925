"""The banner at the start of a run: what it computes, on which hardware, and where its folder is."""

import textwrap
from typing import Any

import lightning as L

_COLUMNS, _CHANGES_LINES = 80, 3
_PATHS = ("run folder", "goes on from")


def banner(
    trainer: L.Trainer, module: L.LightningModule, config: Any, fingerprint: str | None, parameters: int, step: int
) -> str:
    """Return the lines of the banner.

    Args:
        config: the resolved configuration.
        fingerprint: that of the experiment.
        parameters: number of parameters of the full network.
        step: the optimizer step from which the run goes on.
    """
    data: Any = trainer.datamodule
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    group = groups[0] if groups else {"lr": 0.0}  # `configure_optimizers` may return None
    scaling = " after scaling" if getattr(module, "lr_scaling", "none") != "none" else ""
    steps = "steps to the end of a stream" if data.last_step is None else f"{data.last_step} steps"
    processes = f"{trainer.world_size} process{'es' * (trainer.world_size > 1)} on {module.device.type}"
    layout = f" ({data.parallel.dp_size} data-parallel)" * (data.parallel.dp_size != trainer.world_size)
    strategy = config.runtime.strategy or strategy_name(config)
    network = config.runtime.get("model") or type(module).__name__
    facts = {
        "changes": " ".join(config.runtime.changes),
        "experiment": str(fingerprint),
        "virtual ranks": f"{data.virtual_ranks}, computed {'one by one' if data.bit_exact else 'together'}",
        "strategy": f"{strategy}, {processes}{layout}, {trainer.precision}",
        "batch": _batch_size(data),
        "data": data.description,
        "learning rate": f"{group.get('initial_lr', group['lr']):g}{scaling}, {steps}{_left_out(data)}",
        "network": f"{network}, {parameters:,} parameters",
        "run folder": config.run_dir,
    }
    if config.ckpt_path:
        facts["goes on from"] = f"{config.ckpt_path}, step {step}"
    return _in_columns(facts)


def _in_columns(facts: dict[str, str]) -> str:
    """Return a line for each fact, of 80 columns; the changes take up to three, and a path is not broken."""
    width, rows = max(map(len, facts)), []
    for name, value in facts.items():
        lines = [value]
        if name not in _PATHS:
            lines = textwrap.wrap(
                value,
                _COLUMNS - width - 4,
                max_lines=_CHANGES_LINES if name == "changes" else 1,
                placeholder=" ...",
                break_on_hyphens=False,
            )
        rows += [f"  {label:<{width}}  {line}" for label, line in zip([name, "", ""], lines, strict=False)]
    return "\n".join(rows)


def strategy_name(config: Any) -> str:
    """Return the name of the strategy's class."""
    return str(config.strategy._target_).rpartition(".")[2]


def _batch_size(data: Any) -> str:
    batch, dp_size = data.global_batch_size, data.parallel.dp_size
    if data.bit_exact:
        ranks = f"{dp_size} data-parallel rank{'s' * (dp_size > 1)}"
        return f"{batch} = {data.virtual_ranks} x {batch // data.virtual_ranks} per virtual rank, on {ranks}"
    micro_batches = data.layout.micro_batches
    mean_size = batch / micro_batches / dp_size  # uneven shares are larger and smaller
    return f"{batch} = {dp_size} x {micro_batches} micro-batches x {round(mean_size, 2):g} per device"


def _left_out(data: Any) -> str:
    """Return how many samples of an epoch are not trained, because they are no whole batch."""
    (_, count, _), *others = data.training_samples
    rest = count % data.global_batch_size if count and not others and data.has_one_size else 0
    return f"; each epoch leaves out {rest} samples" if rest else ""
