"""The program behind train.py: one command trains, plans, examines this machine, or runs the jobs of a sweep."""

import os
import signal
import sys
from pathlib import Path

import hydra
from dotenv import load_dotenv
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from onecurve.config.command_line import complete_overrides, errors_explained
from onecurve.config.folder import CONF, PROJECT, register_resolvers, remove_if_unused
from onecurve.errors import UserError
from onecurve.process.fork_server import start_fork_server
from onecurve.process.started_by import forget_other_ranks, started_by

_FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own variable: with 1, every error keeps its traceback
TRACEBACK_WANTED = os.environ.get(_FULL_ERROR) == "1"


def main() -> int:
    """Do what the command line asks for; return the exit code of the process.

    A run that fails raises SystemExit, and so does one that stops after a signal (`signals.Stopped`).
    Heavy imports are late, because `--help` should not take seconds.
    """
    load_dotenv(PROJECT / ".env")
    forget_other_ranks()
    register_resolvers()
    before = os.environ.get(_FULL_ERROR, "")
    os.environ[_FULL_ERROR] = "1"  # makes Hydra raise every exception, so that this function can handle it
    try:
        sys.argv = [sys.argv[0], *complete_overrides(sys.argv[1:])]
        with errors_explained(sys.argv[1:]):
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(_run_job)()
    except UserError as error:
        if TRACEBACK_WANTED:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        os.environ[_FULL_ERROR] = before
    return 0


def _run_job(cfg: DictConfig) -> dict[str, float] | float:
    if cfg.doctor:
        from onecurve.extras.doctor.examination import examine

        examine(cfg)
        return {}
    if HydraConfig.get().mode == RunMode.MULTIRUN and not cfg.plan:
        from onecurve.extras.sweeps.job import run_job

        return run_job(cfg)
    if isinstance(cfg.trainer.devices, int) and cfg.trainer.devices > 1 and started_by() is None and not cfg.plan:
        start_fork_server()  # which imports while this process does
    from onecurve.launch.outcome import text_for_terminal
    from onecurve.launch.start import launch

    try:
        if cfg.plan:
            from onecurve.extras.plan.show import show_plan

            show_plan(cfg)
            return {}
        return launch(cfg).metrics
    except Exception as error:
        folder = HydraConfig.get().runtime.output_dir
        if isinstance(error, UserError):
            remove_if_unused(Path(folder))
        if TRACEBACK_WANTED:
            raise
        # Hydra would print all overrides above any other exception.
        raise SystemExit(text_for_terminal(error, folder)) from None
