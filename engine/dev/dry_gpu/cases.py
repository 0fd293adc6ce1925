"""The dry runs: each is a configuration, as one rank of a world."""

from dataclasses import dataclass

DEVICES = 8  # GPUs of a host, as in fake_cuda.cpp
_BATCH = {1: 128, 4: 128, 1024: 2048}  # global batch by world size
DATA = {"train_size": 14000, "test_size": 100}  # six steps of the largest batch


@dataclass(frozen=True)
class Case:
    """One dry run.

    Attributes:
        name: its name in the table.
        overrides: configuration of the run.
        world: number of ranks.
        rank: the rank that is executed.
        resumes: save a checkpoint, and resume from it in a second run, which is the one measured.
    """

    name: str
    overrides: str = ""
    world: int = 1
    rank: int = 0
    resumes: bool = False

    @property
    def title(self) -> str:
        return self.name if self.world == 1 else f"{self.name}, rank {self.rank} of {self.world:,}"

    @property
    def has_process_group(self) -> bool:
        return self.world > 1 or "strategy=" in self.overrides

    def settings(self) -> list[str]:
        """Return the overrides, with the devices, the data and the batch of its world."""
        per_node = min(DEVICES, self.world)
        devices = [f"trainer.devices={per_node}", f"trainer.num_nodes={self.world // per_node}"]
        data = ["data=shapes", *(f"data.source.{name}={size}" for name, size in DATA.items())]
        return [*devices, *data, f"data.batch_size={_BATCH[self.world]}", *self.overrides.split()]


_SPEEDRUN = "experiment=speedrun data.batch_size=1000 data.val_fraction=0.1"
_DROPOUT = "model=vit model.drop_path=0.1 model.dropout=0.1"
_ONE_GPU = [
    Case("default"),
    Case("one group", "virtual_ranks=1"),
    Case("bf16-mixed", "trainer.precision=bf16-mixed"),
    Case("16-mixed", "trainer.precision=16-mixed"),
    Case("adamw", "optimizer=adamw"),
    Case("images on the host", "data.device_resident=false"),
    Case("gradient clipping", "trainer.gradient_clip_val=1.0"),
    Case("accumulation", "trainer.accumulate_grad_batches=2"),
    Case("ema", "callbacks=ema"),
    Case("mixup", "data.augment.mixup=0.2"),
    Case("cutmix and cutout", "data.augment.cutmix=1.0 data.augment.cutout=8"),
    Case("speedrun", _SPEEDRUN),
    Case("vit", "model=vit"),
    Case("vit, drop path", "model=vit model.drop_path=0.1"),
    Case("vit, drop path and dropout", _DROPOUT),
    Case("resnet18", "model=resnet18"),
    Case("gan", "experiment=gan"),
    Case("resumed", resumes=True),
    Case("compiled", "module.compile=true"),
    Case("compiled, vit", "module.compile=true model=vit"),
    Case("compiled, vit, drop path and dropout", f"module.compile=true {_DROPOUT}"),
    Case("compiled, airbench", "module.compile=true model=airbench callbacks=whitening"),
    Case("compiled, speedrun", f"{_SPEEDRUN} module.compile=true"),
    Case("compiled, cutmix and cutout", "module.compile=true data.augment.cutmix=1.0 data.augment.cutout=8"),
    Case("preset gpu", "preset=gpu"),
]

# Rank zero of a pipeline saves the stages of all ranks, which do not exist.
_UNSAVED = "callbacks.best=null callbacks.checkpoint=null"
_ONE_RANK = [
    # In a process group of one rank.
    Case("ddp, rank 0 of 1", "strategy=ddp"),
    Case("fsdp, rank 0 of 1", "strategy=fsdp"),
    Case("pipeline, rank 0 of 1", f"strategy=pipeline {_UNSAVED}"),
]

# The interleaved and zero-bubble schedules need eight blocks.
_SCHEDULES = {"gpipe": "resnet9", "1f1b": "resnet9"}
_SCHEDULES |= dict.fromkeys(["interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"], "resnet18")
_PIPELINES = {
    f"pipeline, {schedule}": f"strategy=pipeline strategy.schedule={schedule} model={model} {_UNSAVED}"
    for schedule, model in _SCHEDULES.items()
}
_SHARDED = {
    "fsdp": "strategy=fsdp",
    "fsdp, bfloat16 weights": "strategy=fsdp strategy.param_dtype=bfloat16 strategy.reduce_dtype=float32",
    "hsdp": "strategy=hsdp",
    "hybrid": f"strategy=hybrid {_UNSAVED}",
    "hybrid, fsdp": f"strategy=hybrid strategy.data_parallel=fsdp {_UNSAVED}",
}
_HOOKS = ["fp16", "bf16", "powersgd strategy.comm_start_step=2", "post_local_sgd strategy.comm_start_step=2"]
_FOUR_GPUS = [
    Case("auto", world=4),
    Case("ddp", "strategy=ddp", world=4),
    Case("ddp, 16-mixed", "strategy=ddp trainer.precision=16-mixed", world=4),
    Case("ddp, gan", "strategy=ddp experiment=gan", world=4),
    Case("ddp, optimizer sharded", "strategy=ddp strategy.shard_optimizer=true callbacks=none", world=4),
    *(Case(f"ddp, {hook.split()[0]}", f"strategy=ddp strategy.comm_hook={hook}", world=4) for hook in _HOOKS),
    *(Case(name, options, world=4, rank=1) for name, options in _SHARDED.items()),
    *(Case(name, options, world=4, rank=rank) for name, options in _PIPELINES.items() for rank in (0, 3)),
    Case("fsdp, ema, clipping", "strategy=fsdp callbacks=ema trainer.gradient_clip_val=1.0", world=4),
    Case("fsdp, bf16-mixed", "strategy=fsdp trainer.precision=bf16-mixed", world=4),
    Case("ddp, compiled", "strategy=ddp module.compile=true", world=4),
    Case("fsdp, compiled", "strategy=fsdp module.compile=true", world=4),
    *(Case(f"{name}, bit_exact", f"{_SHARDED[name]} bit_exact=true", world=4, rank=1) for name in ("fsdp", "hybrid")),
    Case("ddp, bit_exact", "strategy=ddp bit_exact=true", world=4),
    Case("ddp, resumed", "strategy=ddp", world=4, resumes=True),
    Case("fsdp, resumed", "strategy=fsdp", world=4, resumes=True),
]
_MANY_GPUS = [
    Case("ddp", "strategy=ddp", world=1024, rank=513),
    *(Case(name, options, world=1024, rank=513) for name, options in _SHARDED.items()),
    Case("hsdp, 128 replicas", "strategy=hsdp strategy.replicas=128", world=1024, rank=513),
    Case("hybrid, 4 stages", f"{_SHARDED['hybrid']} strategy.stages=4", world=1024, rank=513),
]
CASES = [*_ONE_GPU, *_ONE_RANK, *_FOUR_GPUS, *_MANY_GPUS]

# What is known to make the host wait, by a part of its line: an open issue of this project or of torch.
KNOWN_SYNCHRONIZATIONS = {
    "torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py": "torch draws on the host, and synchronizes",
    "onecurve/network/snapshot.py": "what a step changes before it calls the network of a pipeline is restored",
    "torch/distributed/algorithms/model_averaging/utils.py": "torch synchronizes before it averages the weights",
}
