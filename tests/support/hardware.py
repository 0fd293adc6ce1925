"""Settings of the hardware options that may matter, drawn so that few runs have all choices, or all pairs."""

from itertools import combinations
from random import Random
from typing import Any

from onecurve.parallel.pipeline.schedules import SCHEDULES

Setting = dict[str, Any]
Choices = dict[str, list[Any]]
BATCH = 16  # of the short run
GROUPS = 4  # the most micro-batches of a step: virtual_ranks
COMMON: Choices = {
    "trainer.accumulate_grad_batches": [1, 2, 4],
    "trainer.log_every_n_steps": [1, 3],
    "trainer.num_sanity_val_steps": [0, 1],
    "trainer.deterministic": ["false", "true"],
    "trainer.detect_anomaly": ["false", "true"],
    "trainer.inference_mode": ["true", "false"],
    "data.num_workers": [0, 1],
    "data.device_resident": ["auto", "false", "true"],
    "data.batch_size_per_device": ["null", "share"],  # the share of the same global batch
    "module.channels_last": ["true", "false"],
    "module.recompute": ["none", "blocks"],
    "callbacks": ["none", "default", "[default,evaluation,gradients]"],
    "callbacks.checkpoint.every_n_train_steps": ["null", 2],
}
_SHARES: Choices = {"strategy.shares": ["null", "uneven"]}
_DDP: Choices = {
    **_SHARES,
    "strategy.shard_optimizer": ["false", "true"],
    "strategy.bucket_cap_mb": ["null", 1],
    "strategy.gradient_as_bucket_view": ["true", "false"],
}
_SHARDED: Choices = {"strategy.sharded_checkpoints": ["false", "true"]}
_PIPELINE: Choices = {
    "strategy.schedule": list(SCHEDULES),
    "strategy.microbatches": [2, 4],
    "strategy.split": ["auto", "[layer2]"],
    **_SHARDED,
}
# Without `ddp_spawn`, which starts processes for each run: tests/engine/parity/test_parity.py has it.
STRATEGIES: dict[str, Choices] = {
    "auto": {"trainer.devices": [1, 2]},
    "ddp": {"trainer.devices": [1, 2, 4], **_DDP},
    "fsdp": {
        "trainer.devices": [2, 4],
        **_SHARES,
        "strategy.replicas": [1, 2],
        "strategy.reshard_after_forward": ["true", "false"],
        **_SHARDED,
    },
    "pipeline": {"trainer.devices": [2], **_PIPELINE},
    "hybrid": {
        "trainer.devices": [4],
        "strategy.stages": [2],
        "strategy.data_parallel": ["ddp", "fsdp"],
        **_PIPELINE,
        **_SHARES,
    },
}
VARIED = {*COMMON, *(name for options in STRATEGIES.values() for name in options), "strategy._target_"}


def draw(random: Random) -> Setting:
    """Return a valid setting: the strategy and a value of each option that it has."""
    while True:
        strategy = random.choice(list(STRATEGIES))
        options = COMMON | STRATEGIES[strategy]
        setting = {"strategy": strategy} | {name: random.choice(values) for name, values in options.items()}
        if _is_valid(setting):
            return setting


def cover(strength: int, seed: int = 0, draws: int = 500) -> list[Setting]:
    """Return settings that have each value of an option (strength 1), or each two values of two options (2).

    The values that no setting has together are not counted. The result is always the same.
    """
    random = Random(seed)
    settings = [draw(random) for _ in range(draws)]
    parts = [set(combinations(setting.items(), strength)) for setting in settings]
    missing, chosen = set().union(*parts), []
    while missing:
        best = max(range(draws), key=lambda index: len(missing & parts[index]))
        missing -= parts[best]
        chosen.append(settings[best])
    return chosen


def overrides(setting: Setting) -> list[str]:
    """Return the overrides of a setting."""
    words = [f"{'+' * (name in _ADDED)}{name}={value}" for name, value in setting.items() if name not in _OWN]
    if setting["data.batch_size_per_device"] == "share":
        share = BATCH // (data_parallel(setting) * micro_batches(setting))
        words += ["data.batch_size=null", f"data.batch_size_per_device={share}"]
    if setting.get("strategy.shares") == "uneven":
        words.append(f"strategy.shares=[2{',1' * (data_parallel(setting) - 1)}]")
    if setting["callbacks"] != "none" and setting["callbacks.checkpoint.every_n_train_steps"] != "null":
        words.append(f"callbacks.checkpoint.every_n_train_steps={setting['callbacks.checkpoint.every_n_train_steps']}")
    return words


def data_parallel(setting: Setting) -> int:
    """Return the number of data-parallel ranks."""
    return 1 if setting["strategy"] == "pipeline" else setting["trainer.devices"] // setting.get("strategy.stages", 1)


def micro_batches(setting: Setting) -> int:
    """Return the number of micro-batches of a step: accumulated ones, times those of a pipeline."""
    return int(setting["trainer.accumulate_grad_batches"]) * int(setting.get("strategy.microbatches", 1))


# Options whose values depend on others.
_OWN = ("data.batch_size_per_device", "strategy.shares", "callbacks.checkpoint.every_n_train_steps")
_ADDED = (
    "trainer.deterministic",
    "trainer.detect_anomaly",
    "trainer.inference_mode",
)


def _is_valid(setting: Setting) -> bool:
    schedule = SCHEDULES.get(setting.get("strategy.schedule", ""))
    # The ranks of the pool cannot start worker processes.
    if setting["data.num_workers"] and (setting["data.device_resident"] == "true" or setting["trainer.devices"] > 1):
        return False
    # It needs four stages and as many micro-batches.
    needs_four = schedule is not None and schedule.stages_per_rank > 1
    if needs_four and (setting["strategy.split"] != "auto" or setting["strategy.microbatches"] < 4):
        return False
    if schedule is not None and schedule.splits_backward and setting["module.recompute"] == "blocks":
        return False
    samples = BATCH // micro_batches(setting)
    if setting.get("strategy.shares") == "uneven" and samples <= data_parallel(setting):
        return False
    return micro_batches(setting) <= GROUPS
