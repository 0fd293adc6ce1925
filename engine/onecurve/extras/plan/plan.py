"""`plan=true` and `strategy=best`: the strategies that a run can use, what each needs, and which one is the fastest."""

import itertools
import logging
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import LambdaCallback
from omegaconf import DictConfig, ListConfig, OmegaConf

from onecurve.config.folder import CONF, register_resolvers, typed_overrides
from onecurve.errors import UserError
from onecurve.extras.one_process import on_one_process
from onecurve.extras.plan.hardware import Hardware
from onecurve.extras.plan.pipelines import Stages
from onecurve.extras.plan.profile import Profile
from onecurve.extras.plan.step import Estimate, Job
from onecurve.extras.plan.strategies import OneDevice, Replicas, Shards
from onecurve.network.net import network_of
from onecurve.network.precision import scales_loss
from onecurve.parallel.compatibility import check_can_train
from onecurve.parallel.pipeline.schedules import SCHEDULES
from onecurve.process.devices import check_num_nodes, device_count, resolve_devices
from onecurve.process.signals import prepare_started_process
from onecurve.run.experiment import assemble
from onecurve.targets import build, check_options, locate

AUTO, RECOMPUTE = "strategy=auto", "module.recompute=blocks"
_STAGES, _MICRO_BATCHES = (2, 4, 8, 16), (4, 8, 16)
_MIN_GAIN = 0.05  # of a step, by which another strategy must be faster than `auto`
ADVICE = "Raise trainer.accumulate_grad_batches, or use more devices."


@dataclass
class Candidate:
    """A strategy, as it is chosen on the command line. It has no estimate and no configuration if it is refused."""

    options: list[str]  # the overrides
    estimate: Estimate | None = None
    strategy: DictConfig | None = None  # its configuration
    reason: str = ""  # why another one is better, or the error of the run; empty for the best

    @property
    def name(self) -> str:
        """The options without `strategy`."""
        return " ".join(word.removeprefix("strategy=").removeprefix("strategy.") for word in self.options)


@dataclass
class Plan:
    """The candidates for a run, the best first."""

    job: Job
    steps: int  # optimizer steps of the run
    single: Estimate | None  # a step on one device; None if that would be refused
    candidates: list[Candidate]


def plan_run(cfg: DictConfig) -> Plan:
    """Return the plan of a composed configuration, whose names are checked."""
    hydra_cfg = HydraConfig.get()
    if cfg.data.get("batch_size_per_device"):
        raise UserError("a plan compares strategies that train the same batches: set data.batch_size")
    group = f"strategy={hydra_cfg.runtime.choices.strategy}"
    options = [word for word in typed_overrides() if word.lstrip("+~").startswith("strategy.")]
    if group == "strategy=best" and options:
        raise UserError(f"strategy=best chooses the options of the strategy: leave out {options[0]}")
    asked = [] if group == "strategy=best" else [group, *options]
    if not (cfg.plan and cfg.hardware.get("tflops")):  # as the run that follows, or on this machine
        cfg.trainer.accelerator, cfg.trainer.devices = resolve_devices(cfg.trainer.accelerator, cfg.trainer.devices)
    elif cfg.trainer.devices in ("auto", -1):
        cfg.trainer.devices = cfg.hardware.devices_per_node
    else:
        cfg.trainer.devices = resolve_devices("cpu", cfg.trainer.devices)[1]  # not compared with this machine's GPUs
    check_num_nodes(cfg.trainer.num_nodes)
    return _plan_in_new_process(cfg, asked)


def _plan_in_new_process(cfg: DictConfig, asked: list[str]) -> Plan:
    """Return the plan, made where devices may be used: a launcher never touches one."""
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare) as pool:
            return pool.submit(make_plan, cfg, asked).result()
    except BrokenProcessPool:
        raise UserError("the plan was killed: this machine has too little memory for the weights of `model`") from None


def _prepare() -> None:
    """Let the planning process end with its parent, and show no banner and no advice of Lightning."""
    prepare_started_process()
    warnings.simplefilter("ignore")
    logging.disable()


def make_plan(cfg: DictConfig, asked: list[str]) -> Plan:
    """Return the plan of a composed configuration: the strategy with the overrides `asked`, if any, and others."""
    register_resolvers()
    hardware: Hardware = build(cfg.hardware)
    profile, job, steps = begin_run(cfg, hardware)
    candidates = [estimate(options, cfg, profile, job) for options in _options(job, asked)]
    if "recompute" in cfg.module and not (job.recompute or cfg.module.get("compile")):
        too_large = [one for one in candidates if one.estimate and one.estimate.nbytes > job.memory]
        recomputing = replace(job, recompute=True)
        candidates += [estimate([*one.options, RECOMPUTE], cfg, profile, recomputing) for one in too_large]
    single = None
    with suppress(UserError):
        single = plan_step("auto", profile, replace(job, ranks=1, per_host=1))
    return Plan(job, steps, single, _ranked(candidates, job))


def begin_run(cfg: DictConfig, hardware: Hardware) -> tuple[Profile, Job, int]:
    """Start the run on one process, without callbacks; return the profile of its network, and its number of steps."""
    listed = cfg.trainer.devices if isinstance(cfg.trainer.devices, ListConfig) else []
    device = {"accelerator": "cpu"} if hardware.tflops else {"devices": listed[:1] or 1}
    profiles: list[Profile] = []

    def begin(trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.datamodule.has_one_size:
            raise UserError("a plan needs batches of one size: not several training loaders, nor a batch_sampler")
        profiles.append(Profile(trainer, module))
        raise _HasBegun

    with tempfile.TemporaryDirectory() as folder:
        own = on_one_process(cfg, folder, accumulate_grad_batches=1, **device)
        own.bit_exact = False
        if hardware.tflops and scales_loss(own.trainer.precision):
            own.trainer.precision = "bf16-mixed"  # with as many bytes, on this CPU
        if "recompute" in own.module:
            own.module.recompute = "none"  # the profile has both
        trainer, module, data = assemble(own)
        if network_of(module) is None or not hasattr(module, "loss"):
            raise UserError(f"{type(module).__name__} has no `net` or no `loss`, from which a plan is made")
        trainer.callbacks.append(LambdaCallback(on_train_start=begin))
        with suppress(_HasBegun):
            trainer.fit(module, datamodule=data, weights_only=True)
    if not profiles:
        raise UserError("trainer.max_epochs or max_steps lets this run train nothing, so there is nothing to plan")
    module.to(profiles[0].example.device)  # the end of a run moves it from a GPU to the CPU
    job = Job(
        hardware,
        ranks=device_count(cfg.trainer) * cfg.trainer.num_nodes,
        per_host=device_count(cfg.trainer),
        layout=replace(data.layout, accumulate=cfg.trainer.accumulate_grad_batches),
        is_synchronized=cfg.trainer.sync_batchnorm,
        is_bit_exact=cfg.bit_exact,
        precision=str(cfg.trainer.precision),
        recompute=cfg.module.get("recompute") == "blocks",
    )
    return profiles[0], job, data.total_steps


class _HasBegun(BaseException):
    """Ends the run where training would start."""


def _options(job: Job, asked: list[str]) -> Iterator[list[str]]:
    """Yield the overrides of each candidate: of the one asked for, and of others that train the same."""
    every = [asked or [AUTO], [AUTO]]
    if job.ranks > 1:
        every += [["strategy=ddp", "strategy.shard_optimizer=true"], ["strategy=fsdp"]]
        every.append(["strategy=fsdp", "strategy.reshard_after_forward=false"])
    replicas = max(2, job.ranks // job.per_host)
    if replicas < job.ranks:
        every.append(["strategy=hsdp", f"strategy.replicas={replicas}"])
    for stages in [number for number in _STAGES if job.ranks % number == 0]:
        kind = ["strategy=pipeline"] if stages == job.ranks else ["strategy=hybrid", f"strategy.stages={stages}"]
        counts = _MICRO_BATCHES[:1] if job.is_bit_exact else _MICRO_BATCHES  # micro-batches are virtual ranks
        for schedule, count in itertools.product(SCHEDULES, counts):
            every.append([*kind, f"strategy.schedule={schedule}", f"strategy.microbatches={count}"])
    yield from (options for number, options in enumerate(every) if options not in every[:number])


_PLANS = {"auto": OneDevice, "DDP": Replicas, "DDPSpawn": Replicas, "FSDP": Shards, "Pipeline": Stages}


def plan_step(strategy: Any, profile: Profile, job: Job) -> Estimate:
    """Return the step of a run under a strategy, or `auto` for none; its UserError is that of the run."""
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    if own := getattr(strategy, "plan", None):
        return locate(f"the plan of {name}", own)(strategy, profile, job).estimate()
    if name not in _PLANS:
        raise UserError(f"strategy={name.lower()} cannot be planned: take ddp, fsdp, hsdp, pipeline or hybrid")
    return _PLANS[name](strategy, profile, job).estimate()


def estimate(options: list[str], cfg: DictConfig, profile: Profile, job: Job) -> Candidate:
    """Return a candidate with its estimate, or with the error with which the run would be refused."""
    group, *others = [word for word in options if word != RECOMPUTE]
    values = [word for word in others if word[0] not in "+~"]
    own = OmegaConf.masked_copy(cfg, ["trainer"])
    try:
        own.strategy = _compose(group, *(word for word in others if word not in values))
        own.merge_with_dotlist(values)
        composed = own.strategy.copy()
        OmegaConf.resolve(own)
        check_options(OmegaConf.masked_copy(own, ["strategy"]))
        strategy = build(own.strategy)
        check_can_train(strategy, profile.module)
        return Candidate(options, plan_step(strategy, profile, job), composed)
    except UserError as error:
        return Candidate(options, reason=str(error))


@lru_cache
def _compose(group: str, *options: str) -> Any:
    """Return what Hydra composes, in about 80 ms; most candidates differ in values only."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(group.replace("=", "/"), list(options)).strategy


def _ranked(candidates: list[Candidate], job: Job) -> list[Candidate]:
    """Return the candidates, the fastest that fits first, and say why the others lost. `auto` need not be faster."""

    def order(one: Candidate) -> tuple[bool, bool, float]:
        if not one.estimate:
            return True, True, 0.0
        if one.estimate.nbytes > job.memory:
            return False, True, one.estimate.nbytes
        return False, False, one.estimate.step_ms * (1 - _MIN_GAIN * (one.options[0] == AUTO))

    ranked = sorted(candidates, key=order)
    best = ranked[0].estimate
    for candidate in ranked:
        step = candidate.estimate
        if step and step.nbytes > job.memory:
            candidate.reason = f"needs {step.nbytes / 2**30:.1f} GiB of {job.memory / 2**30:.1f}"
        elif step and best and step is not best:
            name = max(("communication", "bubble"), key=lambda part: step.seconds.get(part, 0.0))
            waits, slower = step.seconds.get(name, 0.0), step.step_ms / best.step_ms - 1
            is_kept = ranked[0].options[0] == AUTO and slower <= 0
            how = f"not {_MIN_GAIN:.0%} faster than auto" if is_kept else f"{slower:.0%} slower"
            candidate.reason = f"{how}; {name} is {1000 * waits / step.step_ms:.0%} of a step"
    return ranked


def choose_strategy(cfg: DictConfig) -> None:
    """Set the best strategy in a composed configuration, as if it had been typed; print the choice."""
    plan = plan_run(cfg.copy())
    best = plan.candidates[0]
    if best.reason or not best.estimate:
        raise UserError(f"strategy=best: no strategy can train this; {best.name}: {best.reason}. {ADVICE}")
    _set_best(cfg, plan)
    words = [word for word in typed_overrides() if word != "strategy=best"] + best.options
    own: Any = HydraConfig.instance().cfg
    OmegaConf.set_readonly(own.hydra, False)
    own.hydra.overrides.task, own.hydra.runtime.choices.strategy = words, cfg.runtime.strategy
    cfg.runtime.chooses_strategy = True


def choose_again(cfg: DictConfig) -> None:
    """Set the strategy that is the best for the devices of a resolved configuration, which have changed.

    If none fits, the one with the smallest need is tried. If the plan fails, the run goes on with its own strategy.
    """
    try:
        plan = _plan_in_new_process(cfg, [])
    except Exception as error:  # a device that is about to fail may raise anything
        print(f"going on with the strategy as it is, because its plan failed: {error}", file=sys.stderr)
        return
    if plan.candidates[0].estimate:
        _set_best(cfg, plan)
        OmegaConf.resolve(cfg)
        if OmegaConf.select(cfg, "callbacks.throughput"):
            cfg.callbacks.throughput.planned_step_ms = cfg.runtime.planned_step_ms


def _set_best(cfg: DictConfig, plan: Plan) -> None:
    best, *others = plan.candidates
    assert best.estimate
    reasons = "".join(f"; {one.name}: {one.reason}" for one in others[:3])
    print(f"best: {best.name}, {best.estimate.step_ms:.0f} ms a step{reasons}", file=sys.stderr)
    cfg.strategy, cfg.runtime.strategy = best.strategy, best.options[0].partition("=")[2]
    if RECOMPUTE in best.options:
        cfg.module.recompute = "blocks"
    cfg.runtime.planned_step_ms = best.estimate.step_ms
