"""Mistakes with the engine's options end in one line with the option and the remedy.

tests/template/test_refusals.py has those with models and data. Mistakes that need a special file or a trained
checkpoint are in the folder of their subject.
"""

import copy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onecurve import Batch
from onecurve.errors import UserError
from onecurve.run.experiment import run_experiment
from src.models.classifier import ImageClassifier
from tests.support.commands import error_line, run_here
from tests.support.experiments import SHORT_RUN
from tests.support.pool import Pool, RankFailed
from tests.support.runs import compose

CHOICES = [
    ("model=resnet8", "model=resnet8: did you mean resnet18"),
    ("experiment=resnet10", "experiment=resnet10: did you mean resnet"),
    ("model=null", "model=null: give one of airbench, mlp"),
    ("model=", "model=: known: airbench, mlp"),
    ("~seed", "seed is left out, which each run needs"),
    ("~launch.timeout", "launch.timeout is left out, which each run needs"),
    (
        "~model data=shapes",
        "lacks: set module.net=..., or, if your `data` and `module` need none, leave it out with ~module.net",
    ),
    ("strategy=2", "strategy=2: give one of auto, best"),
    ("model=mlp,vit", "Ambiguous value for argument 'model=mlp,vit'"),
    ("callbacks=[default,emma]", "callbacks=emma: did you mean ema"),
    ("hydra/sweeper=ax", "hydra/sweeper=ax: known: basic, optuna"),
    ("trainer=ddp", "trainer=ddp: known: default; there is strategy=ddp"),
]
NAMES = [
    ("lr=4", "lr is no option here; did you mean optimizer.lr"),
    ("modle=vit", "modle is no option here; did you mean module or model?"),
    ("nowhere.nothing=2", "python train.py --cfg job lists all"),
    ("train=false", "train is no option here; did you mean fit?"),
    ("+gpus=2", "gpus is no option here; did you mean trainer.devices?"),
    ("trainer.deterministic=warn", "(+trainer.deterministic=... adds it to the configuration)"),
    ("+optimizer.lr=2", "An item is already at 'optimizer.lr'. Either remove + prefix: 'optimizer.lr=2'"),
]
VALUES = [
    ("'trainer.max_epochs = 3'", "trainer.max_epochs = 3: LexerNoViableAltException"),
    ("'callbacks.x={a: 1 ]'", "callbacks.x={a: 1 ]: no viable alternative at input"),
    ("~data._target_", "data has no `_target_`: let its file in conf/data name a class or function"),
    ("test=bst", "test=bst: give true, false or best"),
    ("module.tta=shiftt", "module.tta=shiftt: did you mean shift?"),
    ("trainer.devices=none", "trainer.devices=none"),
    ("trainer.devices=[0,0]", "trainer.devices=[0, 0] lists a device twice"),
    ("launch.max_restarts=abc", "launch.max_restarts=abc: give an integer"),
    ("resume=yes", "resume=yes: give auto, or null"),
    ("trainer.accelerator=gpu", "trainer.accelerator=gpu"),
]
PATHS = [
    ("ckpt_path=", "ckpt_path= is empty: give a path, or leave the option out"),
    ("init_from=", "init_from= is empty: give a path"),
    ("predict=", "predict= is empty: give a path"),
    ("ckpt_path=nowhere", "ckpt_path=nowhere"),
    ("predict=nowhere", "nowhere: there is no such folder, or no image in it"),
    ("data=module predict=tests", "has no option predict_dir; set predict=true to predict the samples of its"),
    ("run_dir=/proc/nothing", "cannot make the folder /proc/nothing (No such file or directory): set run_dir"),
    ("-m seed=0,1 hydra.sweep.dir=/proc/x", "hydra.sweep.dir=/proc/x: cannot make the folder (No such file or"),
    ("sweep=tests", "tests: there is no sweep in that folder"),
]
TOGETHER = [  # options that exclude or need each other
    ("resume=auto run_dir=null", "resume=auto needs run_dir=FOLDER"),
    ("trainer.num_nodes=2", "trainer.num_nodes=2"),
    ("trainer.num_nodes=0", "trainer.num_nodes=0: give the number of hosts"),
    ("trainer.num_nodes=two", "trainer.num_nodes=two: give the number of hosts"),
    ("launch.min_devices=3 trainer.devices=2", "launch.min_devices=3"),
    ("launch.elastic=true data.batch_size_per_device=8", "launch.elastic=true"),
    ("-m doctor=true seed=0,1", "doctor=true checks a single run: leave out -m"),
]


SIMILAR = [  # each to a row above
    ("logger.wandb.nam=x", "logger.wandb.nam is no option here; did you mean"),
    ("+foo=3", "foo is no option here; python train.py --cfg job lists all"),
    ("-m model=mlp,vit lr=4", "lr is no option here; did you mean optimizer.lr?"),
    ("fit=yes", "fit=yes: give true or false"),
    ("init_from=nowhere", "init_from=nowhere"),
    ("predict=tests", "tests: there is no such folder, or no image in it"),
    ("launch.elastic=true strategy=ddp strategy.shares=[2,1]", "launch.elastic=true"),
]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *[*CHOICES, *NAMES, *VALUES, *PATHS, *TOGETHER],
        *(pytest.param(*row, marks=pytest.mark.slow) for row in SIMILAR),
    ],
)
def test_refused_by_the_command_line(words: str, message: str, folder: Path) -> None:
    if "accelerator=gpu" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    given = shlex.split(words)
    place = "hydra.sweep.dir" if given[0] == "-m" else "run_dir"
    places = [] if given[0].startswith(("hydra/", "sweep=")) or "dir=" in words else [f"{place}={folder}"]
    cpu = [] if "accelerator" in words or given[0].startswith("sweep=") else ["trainer.accelerator=cpu"]
    _, err = run_here(*given, *cpu, *places, code=1)
    assert message in error_line(err)
    assert given[0] == "-m" or not list(folder.glob("*/*")), "no file of a run is left"


GLOBAL = "# @package _global_\n"
RECIPES = {  # the text of a file in conf/experiment
    f"{GLOBAL}traner: {{max_epochs: 5}}": "traner is no option here; did you mean trainer",
    f"{GLOBAL}limit_train_batches: 5": "is no option here; did you mean trainer.limit_train_batches",
    f"{GLOBAL}launch: {{max_restart: 1}}": "launch.max_restart is no option here; did you mean launch.max_restarts",
    f"{GLOBAL}max_epochs: 5": "max_epochs is no option here; did you mean trainer.max_epochs?",
    f"{GLOBAL}base_lr: 0.2\noptimizer: {{lr: '${{base}}'}}": "base_lr is no option here",
    f"{GLOBAL}defaults:\n  - override /modle: mlp": "Could not override 'modle'. No match in the defaults list.",
    f"{GLOBAL}trainer:\n  max_epochs: 5\n seed: 5": '/experiment/mine.yaml", line 4',
    f"{GLOBAL}defaults:\n  - model: mlp": "experiment: write `- override /model: mlp` among the `defaults` of its file",
    "defaults:\n  - override /model: mlp": "begin conf/experiment/mine.yaml with the line `# @package _global_`",
    "trainer: {max_epochs: 5}": "begin each file of conf/experiment with the line `# @package _global_`",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_refused(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"{recipe}\n")
    words = ["experiment=[quickstart,mine]", "trainer.accelerator=cpu", f"run_dir={tmp_path}/run"]
    _, err = run_here(f"hydra.searchpath=[file://{tmp_path}]", *words, code=1)
    assert RECIPES[recipe] in error_line(err)


class Reduces(ImageClassifier):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0 * self.all_gather(batch.weight).sum()


class LogsSome(ImageClassifier):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if 0 in batch.target:
            self.log("seen", 1.0)
        return super().training_step(batch, batch_idx)


class ReturnsSome(ImageClassifier):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if 0 in batch.target else None


class ResizesBuffer(ImageClassifier):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("late", None)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.late = batch.image.mean(0)
        return super().training_step(batch, batch_idx)


class Renormalizes(ImageClassifier):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = nn.Embedding(3, 2, max_norm=1.0)


class MovesCode(ImageClassifier):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.code = nn.Parameter(torch.zeros(3), requires_grad=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.code.data.add_(1)
        return super().training_step(batch, batch_idx)


class LogsBatches(ImageClassifier):
    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.log("v", 1.0, on_step=True)
        return super().validation_step(batch, batch_idx)


class EvaluatesTogether(ImageClassifier):
    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.all_gather(batch.weight)
        return super().validation_step(batch, batch_idx)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape)


def noisy(num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), Noisy(), nn.Linear(8, num_classes))


class Adding(nn.Linear):
    """Adds to a tensor in place, as a flow does to the log-determinant of the layers before."""

    def forward(self, x: Tensor) -> Tensor:
        x += super().forward(x)
        return x


def adding(num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), Adding(8, 8), nn.Linear(8, num_classes))


class CopiesNetwork(ImageClassifier):
    """Copies the network in a step, as for the inner loop of meta-learning."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        copy.deepcopy(self.net)
        return super().training_step(batch, batch_idx)


TYPES = [
    ("trainer.max_epochs=ten", "trainer.max_epochs=ten: give an integer"),
    ("trainer.max_steps=1.5", "trainer.max_steps=1.5: give an integer"),
    ("optimizer.nesterov=[1]", r"optimizer.nesterov=\[1\]: give true or false"),
    ("optimizer.lr=abc", "optimizer.lr=abc: give a number"),
    ("module.channels_last=no", "module.channels_last=no: give true or false"),
    ("model=mlp model.hidden=a", "model.hidden=a: give a list, each an integer"),
    ("model=mlp model.hidden=[16,a]", r"model.hidden=\[16, 'a'\]: give a list, each an integer"),
    ("model=mlp model.hidden=16", "model.hidden=16: give a list, each an integer"),
    ("seed=-1", "seed=-1"),
    ("seed=4294967296", "seed=4294967296 is not a seed"),
    ("optimizer.lr=inf", "optimizer.lr=inf is not a learning rate"),
    ("optimizer.lr=nan", "optimizer.lr=nan is not a learning rate"),
    ("scheduler.warmup=25", "scheduler.warmup=25: give the fraction of the run"),
]
TARGETS = [
    ("model._target_=src.models.", "model._target_=src.models."),
    ("model._target_=timn.Net", "model._target_=timn.Net: No module named 'timn'"),
    (
        "model._target_=src.models.mlp.mpl",
        r"model._target_=.*: src.models.mlp has no mpl; did you mean mlp\?",
    ),
    ("model._target_=torch.float32", "model._target_=torch.float32: .* is a dtype; give a class or a function"),
    ("model._target_=src.models", "model._target_=src.models: .* is a module; give a class or a function"),
    ("+optimizer.lrr=0.1", "optimizer.lrr: torch.optim.SGD has no option `lrr`; did you mean lr"),
    ("+trainer.max_epoch=1", "onecurve.Trainer has no option `max_epoch`; did you mean max_epochs"),
    ("~model.num_classes", "model.num_classes is missing, and src.models.*resnet9 has no default for it: add it"),
    ("~optimizer._partial_", "optimizer.params is missing, .* or `_partial_: true` if code gives it later"),
    ("optimizer._target_=torch.optim.LBFGS", "`optimizer` cannot be built"),
]
TRAINER = [
    ("+trainer.strategy=ddp", r"\+trainer.strategy=ddp: "),
    ("+trainer.callbacks=[]", r"\+trainer.callbacks=\[\]: "),
    ("+trainer.bit_exact=true", r"\+trainer.bit_exact=true: .*use .*, bit_exact, "),
    ("+trainer.seed=5", r"\+trainer.seed=5: .*use .*, seed, "),
    ("+trainer.enable_checkpointing=false", "leave it out, and use `strategy`, `callbacks`"),
    ("+trainer.overfit_batches=1", "trainer.overfit_batches=1: .*use .*debug=overfit"),
    ("trainer.log_every_n_steps=0", "trainer.log_every_n_steps=0"),
    ("trainer.check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch=0: give at least one"),
    ("trainer.precision=fp8", "fp8"),
    ("trainer.precision=16-mixed", "trainer.precision=16-mixed needs a GPU: take bf16-mixed"),
    ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1: give a number above zero, or null"),
    ("model=mlp test=best callbacks.best=null trainer.max_steps=1", "this run keeps no best checkpoint"),
]
BATCHES = [
    ("data.batch_size=10 trainer.accumulate_grad_batches=4", "data.batch_size=8 or 12"),
    ("data.batch_size=33 data.augment.mixup=0.8", "pairs of samples, which .*mixup and cutmix mix: .*=32 or 34"),
    ("data.batch_size_per_device=8", "set the other to null"),
    ("data.batch_size=1000", "exceeds the 360 samples"),
    ("data.batch_size=12.5", "data.batch_size=12.5"),
    ("trainer.limit_train_batches=0", "trainer.limit_train_batches=0 trains nothing"),
    ("trainer.limit_train_batches=0.01", "trainer.limit_train_batches=0.01 leaves nothing of 11"),
    ("trainer.limit_train_batches=-1", "trainer.limit_train_batches=-1"),
    ("+trainer.val_check_interval=00:00:01:00", "ranks cannot validate by the clock"),
    ("+trainer.val_check_interval=0", "trainer.val_check_interval=0: give at least one"),
    ("+trainer.val_check_interval=12", "trainer.val_check_interval=12 exceeds the 11 steps of an epoch"),
    ("trainer.accumulate_grad_batches=8", "virtual_ranks=4 does not divide .* set virtual_ranks=8"),
    ("virtual_ranks=64", "virtual_ranks=64 exceeds data.batch_size=32"),
    ("virtual_ranks=0", "virtual_ranks=0"),
    ("data.device_resident=true data.num_workers=2", r"data\.device_resident"),
    ("data.device_resident=gpu", r"data\.device_resident"),
]
PLATEAU = "scheduler=torch scheduler.scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau model=mlp"
MODULES = [
    ("module.recompute=layers", "module.recompute=layers: known: blocks, none"),
    ("module.recompute=blocks module.compile=true", "module.compile=True and module.recompute=blocks"),
    ("module.recompute=blocks model=mlp model.hidden=[]", "`model` has no block of several layers"),
    ("module.compile=max-autotun", "module.compile=max-autotun: .* did you mean max-autotune"),
    ("scheduler=torch scheduler.scheduler._target_=torch.optim.lr_scheduler.StepLR", "StepLR: .*step_size"),
    (f"{PLATEAU} scheduler.interval=batch", "scheduler.interval=batch"),
    (f"{PLATEAU} scheduler.frequency=0", "scheduler.frequency=0: give an integer of at least one"),
    ("module.reference_batch_size=0 model=mlp", "module.reference_batch_size=0: give a number of samples"),
    (
        f"{PLATEAU} trainer.limit_val_batches=0 callbacks.best=null",
        "ReduceLROnPlateau monitors val/loss, but the run has no validation",
    ),
    (f"{PLATEAU} trainer.check_val_every_n_epoch=2", "set scheduler.frequency=2"),
]
CALLBACKS = [
    ("+callbacks.more=1", "callbacks.more=1: set callbacks to names of files of conf/callbacks"),
    ("callbacks.best.mode=maxx", "ModelCheckpoint: `mode` can be .* got maxx"),
    ("callbacks.checkpoint.every_n_epochs=0", "callbacks.checkpoint.every_n_epochs"),
    ("callbacks.checkpoint.every_n_train_steps=0", "callbacks.checkpoint.every_n_train_steps"),
    ("callbacks.checkpoint.train_time_interval=often", "callbacks.checkpoint.train_time_interval"),
    ("callbacks.best.monitor=val/f1", "callbacks.best monitors val/f1, .*it logs val/loss"),
    ("callbacks=[default,early_stopping] callbacks.early_stopping.monitor=val/ac", "val/ac"),
    ("callbacks=[default,ema] callbacks.ema.decay=1.5", "callbacks.ema.decay=1.5"),
    ("callbacks=[default,ema] +callbacks.best.save_weights_only=true", "save_weights_only omits the average"),
    ("experiment=gan callbacks=[default,gradients] callbacks.best=null", "modules with one optimizer, but .* has 2"),
]
EXACT = "bit_exact=true virtual_ranks"
VIRTUAL_RANKS = [
    (f"{EXACT}=3", "bit_exact=true: virtual_ranks=3 must be a power of two"),
    (f"{EXACT}=64", "64 must divide data.batch_size=32"),
    (f"{EXACT}=32 data.augment.mixup=0.8", "64 must divide data.batch_size=32"),
    (
        f"{EXACT}=4 trainer.accumulate_grad_batches=2",
        "passes already: set trainer.accumulate_grad_batches=1",
    ),
    (f"{EXACT}=4 experiment=gan", "bit_exact=true divides each step into parts, but GAN optimizes manually"),
    (
        "experiment=gan trainer.accumulate_grad_batches=2",
        "trainer.accumulate_grad_batches=2 divides each step into parts",
    ),
    (
        f"{EXACT}=4 strategy=fsdp strategy.param_dtype=bfloat16 trainer.devices=2",
        "adds gradients within a round in half precision, .* set strategy.reduce_dtype=float32",
    ),
    (
        f"{EXACT}=4 strategy=fsdp trainer.precision=bf16-true trainer.devices=2",
        "trainer.precision=bf16-true has other bits under strategy=fsdp .* trainer.precision=bf16-mixed",
    ),
    (
        f"{EXACT}=4 strategy=fsdp strategy.shares=[3,1] trainer.devices=2",
        r"strategy.shares=\[3, 1\] divides the gradients",
    ),
    ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0: give a number of micro-batches"),
    ("bit_exact=ja", "bit_exact=ja: give true or false"),
    (
        f"{EXACT}=4 strategy=hsdp trainer.devices=4",
        r"strategy.replicas=2 \(hsdp\) divides the gradients",
    ),
    (f"{EXACT}=4 strategy=fsdp trainer.devices=3", "3 processes do not divide virtual_ranks=4, .* strategy=ddp"),
    (
        f"{EXACT}=4 strategy=hybrid strategy.data_parallel=fsdp trainer.devices=4",
        "strategy.data_parallel=fsdp .* take ddp",
    ),
    (f"{EXACT}=4 strategy=ddp strategy.comm_hook=fp16 trainer.devices=2", "unset strategy.comm_hook=fp16"),
    (f"{EXACT}=4 strategy._target_=lightning.pytorch.strategies.DDPStrategy", "DDPStrategy adds gradients in an order"),
    *[
        (f"{parts} module._target_={__name__}.Renormalizes model=mlp", "table has max_norm, .* normalize its outputs")
        for parts in (f"{EXACT}=4", "trainer.accumulate_grad_batches=2", "strategy=ddp trainer.devices=2")
    ],
    (
        f"{EXACT}=4 module._target_={__name__}.MovesCode model=mlp",
        "the frozen weight code changes in training_step, .* buffer",
    ),
    (
        f"trainer.accumulate_grad_batches=2 module._target_={__name__}.MovesCode model=mlp",
        "the frozen weight code changes",
    ),
    *[
        (f"{EXACT}=4 module._target_={__name__}.{name} model=mlp", f"bit_exact=true.*{message}")
        for name, message in {
            "Reduces": r"communicates between ranks \(all_gather, reduce\): log with sync_dist=True",
            "LogsSome": "logs other names, or returns None, for some virtual ranks only",
            "ReturnsSome": "logs other names, or returns None, for some virtual ranks only",
            "ResizesBuffer": "adds, removes or resizes the buffer late, .* give it its shape in the constructor",
            "LogsBatches": "v is logged for each batch of an evaluation, .* log it with on_step=False",
            "EvaluatesTogether": "a step of the module communicates between ranks",
        }.items()
    ],
]
STRATEGIES = [
    ("strategy=dp trainer.devices=2", "this run has 0: .* take strategy=ddp"),
    ("strategy=ddp strategy.comm_hook=powersdg", "strategy.comm_hook=powersdg: .*did you mean powersgd"),
    ("strategy=ddp strategy.comm_start_step=1", "strategy.comm_start_step=1: .* give 2"),
    ("strategy=fsdp strategy.param_dtype=half-ish", "strategy.param_dtype=half-ish is no data type"),
    ("strategy=pipeline strategy.schedule=1f1", "strategy.schedule=1f1: did you mean 1f1b"),
    ("strategy=fsdp model._target_=tests.support.zoo.hooked ~model.norm", "lose the hook of the parameter net"),
    ("strategy=ddp_spawn model._target_=tests.support.zoo.hooked ~model.norm", "lose the hook of the parameter net"),
]


@pytest.mark.parametrize(
    ("words", "message"), [*TYPES, *TARGETS, *TRAINER, *BATCHES, *MODULES, *CALLBACKS, *VIRTUAL_RANKS, *STRATEGIES]
)
def test_refused_by_the_run(words: str, message: str, small: list[str], folder: Path) -> None:
    batch = [] if "per_device" in words else ["data.batch_size=32"]
    with pytest.raises(UserError, match=message) as caught:
        run_experiment(compose(folder, *small, *batch, "trainer.max_epochs=1", *shlex.split(words)))
    assert "\n" not in str(caught.value)


PIPELINE = "strategy=pipeline"
TWO_BLOCKS = f"{PIPELINE} model=mlp ~model.width model.hidden=[16]"
POST_LOCAL = "strategy=ddp strategy.comm_hook=post_local_sgd"
ON_RANKS = [
    (f"{EXACT}=1 strategy=ddp", "virtual_ranks=1 leaves one of 2 data-parallel ranks without one"),
    (f"{EXACT}=1 {PIPELINE}", "1f1b with 1 micro-batches: .* virtual_ranks"),
    (f"{EXACT}=4 {PIPELINE} model._target_={__name__}.noisy ~model.norm ~model.width", "torch.randn, .* draws numbers"),
    ("strategy=ddp strategy.comm_hook=bf16", "take fp16"),
    (f"{POST_LOCAL} callbacks=[default,ema]", "callbacks.ema"),
    (f"{POST_LOCAL} experiment=gan data=shapes", "post_local_sgd"),
    ("strategy=ddp model._target_=tests.support.zoo.Unused ~model.norm", r"auxiliary.* \+strategy.find_unused_param"),
    ("strategy=fsdp strategy.replicas=3", "strategy.replicas=3 does not divide the 2 processes"),
    ("strategy=fsdp module._target_=tests.support.zoo.L1Penalty", "training_step reads weights outside"),
    (f"strategy=fsdp model._target_={__name__}.adding ~model.norm ~model.width", "changes a tensor in place that it"),
    (f"strategy=fsdp module._target_={__name__}.CopiesNetwork", "training_step copies a network, of which"),
    (f"{PIPELINE} strategy.microbatches=0", "strategy.microbatches=0"),
    (f"{PIPELINE} strategy.microbatches=8", "virtual_ranks=4 does not divide over the 8 micro-batches"),
    (f"{PIPELINE} strategy.microbatches=1", "1f1b with 1 micro-batches: .* gpipe takes any number"),
    (f"{PIPELINE} strategy.stages=3", "strategy.stages=3 does not divide the 2 processes"),
    (f"{PIPELINE} strategy.split=[layer9]", "strategy.split: no cut can be before layer9; did you mean layer"),
    (f"{PIPELINE} strategy.split=[9]", "strategy.split: no cut can be before 9; "),
    (f"{PIPELINE} strategy.split=[layer2,layer3]", "2 stages need 1 cuts"),
    (f"{TWO_BLOCKS} strategy.split=[layer1]", "no cut into 2 stages that leaves"),
    (f"{TWO_BLOCKS} strategy.schedule=interleaved_1f1b", "4 stages, but `model` has 2 blocks with parameters"),
    (f"{PIPELINE} trainer.precision=16-mixed", "16-mixed"),
    (f"{PIPELINE} module.compile=true", "module.compile=true"),
    (f"{PIPELINE} strategy.schedule=zbv_zero_bubble module.recompute=blocks", "zbv_zero_bubble.*module.recompute=b"),
]


@pytest.mark.parametrize(("words", "message"), ON_RANKS)
def test_refused_by_the_ranks(words: str, message: str, pool: Pool, small: list[str], folder: Path) -> None:
    task = [] if "experiment=" in words or "_target_" in words else SHORT_RUN
    with pytest.raises(RankFailed, match=f"UserError: .*{message}"):
        pool.run(2, run_experiment, compose(folder, *small, *task, *shlex.split(words), "trainer.devices=2"))
