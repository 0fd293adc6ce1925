"""Run one job of a sweep and record its outcome; the sweep continues even if the job fails, unless all jobs would."""

import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from onecurve.config.folder import typed_overrides
from onecurve.config.resolve import resolve_config
from onecurve.errors import UserError
from onecurve.extras.jobs import DONE, Job, find_job
from onecurve.extras.sweeps.devices import reserve_devices
from onecurve.launch.outcome import fold_frames
from onecurve.launch.start import launch
from onecurve.process import signals
from onecurve.process.started_by import started_rank
from onecurve.records.files import named_lock
from onecurve.targets import check_options


def run_job(cfg: DictConfig) -> float:
    """Run the job, unless it has finished before; return its result, or nan if it failed or has none.

    An interrupted job continues from its newest checkpoint. The error of a failed job is not raised, because it would
    make Hydra's launchers and sweepers end the sweep.
    """
    cfg.resume = "auto"  # from the newest checkpoint of an earlier start
    if started_rank() > 0:  # SLURM started several processes for this job
        found = find_job(Path(HydraConfig.get().sweep.dir), typed_overrides())
        if found and found[1].status in DONE:
            return nan
        try:
            launch(cfg)
        except signals.Stopped:
            raise
        except SystemExit:
            pass  # rank zero reports the error; submitit would end the sweep if a process failed
        return nan
    # joblib sets a start method of its own, which fails in the workers.
    multiprocessing.set_start_method(None, force=True)
    folder = Path(HydraConfig.get().runtime.output_dir)
    with named_lock(str(folder)):  # the same sweep may run twice at the same time
        job = Job.read(folder)
        if job.status in DONE:
            print(f"job {folder.name} has {job.status} before")
            if job.metric != (cfg.optimized_metric or ""):
                _set_result(job, cfg.optimized_metric)
                job.write(folder)
        else:
            _run(cfg, job, folder)
    return nan if job.result is None else job.result


def _run(cfg: DictConfig, job: Job, folder: Path) -> None:
    """Run the job, and write its record at the start and at the end, whatever the end is."""
    job.status, job.error, job.metric = "running", "", cfg.optimized_metric or ""
    job.write(folder)
    began = time.monotonic()

    @contextmanager
    def reserve_then_begin(cfg: DictConfig) -> Iterator[None]:
        nonlocal began
        with reserve_devices(cfg):
            began = time.monotonic()  # the wait for free devices is not part of the job
            yield

    try:
        job.metrics = launch(cfg, reserve_then_begin).metrics
        _set_result(job, cfg.optimized_metric)
        job.status = "finished"
    except Exception as error:
        job.status = "failed"
        job.error = str(error) if isinstance(error, UserError) else traceback.format_exc()
        if isinstance(error, UserError) and _is_of_every_job(error, job, folder.parent):
            raise SystemExit(f"error: no job can start: {error}") from None
        print(f"job {folder.name} failed: {fold_frames(str(error))}", file=sys.stderr)
    except BaseException:  # a signal
        job.status = "stopped"
        print(f"sweep={folder.parent} goes on with the sweep", file=sys.stderr)
        raise
    finally:
        job.seconds = time.monotonic() - began
        job.write(folder)
    if number := signals.requested():  # it came too late for this job, and must stop the sweep
        print(f"sweep={folder.parent} goes on with the sweep", file=sys.stderr)
        raise signals.Stopped(number)


def _set_result(job: Job, metric: str | None) -> None:
    """Set the optimized metric of the job and its value; warn if the job has not logged it."""
    job.metric = metric or ""
    job.result = job.metrics.get(job.metric)
    if job.metric and job.result is None:
        logged = ", ".join(name for name in job.metrics if not name.startswith(("throughput/", "ranks/")))
        print(f"warning: the job logs no {job.metric}: set optimized_metric to one of {logged}", file=sys.stderr)


def _is_of_every_job(error: UserError, job: Job, sweep: Path) -> bool:
    """Return whether the sweep's command has the same error without the options that differ between the jobs."""
    typed = OmegaConf.load(sweep / "multirun.yaml").hydra.overrides
    common = [word for word in job.overrides if word in typed.task]
    try:
        check_options(resolve_config(hydra.compose("train", [*typed.hydra, *common]), plans=False))
    except (UserError, HydraException, OmegaConfBaseException) as other:
        return str(other) == str(error)
    return False
