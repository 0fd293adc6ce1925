"""`plan=true`: the table of a plan, its page, and plan.json with all details."""

import json
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onecurve.config.folder import typed_overrides
from onecurve.config.resolve import refuse_unknown_options
from onecurve.extras.plan.plan import ADVICE, Candidate, Plan, plan_run
from onecurve.extras.plan.step import Estimate
from onecurve.records.files import atomic_write
from onecurve.targets import check_value, drop_replaced_options

_SHOWN = 15  # rows of the table; plan.json has all
_TEXTS = ("strategy", "why not")
_DETAILS = ("options", "memory", "seconds", "collectives")  # of plan.json, which are no columns


def show_plan(cfg: DictConfig) -> None:
    """Plan the run, print the table and the errors, and write plan.json and the page into the run folder."""
    runtime = HydraConfig.get().runtime
    check_value("plan", cfg.plan, bool)
    drop_replaced_options(cfg, typed_overrides())
    refuse_unknown_options(cfg, runtime.choices)
    plan, folder, hardware = plan_run(cfg), Path(runtime.output_dir), runtime.choices.hardware
    rows = [_row(one, one.estimate, plan) for one in plan.candidates if one.estimate]
    refused: dict[str, list[str]] = {}
    for candidate in plan.candidates:
        if not candidate.estimate:
            refused.setdefault(candidate.reason, []).append(candidate.name)
    job = plan.job
    content: dict[str, Any] = {
        "title": f"{job.ranks} ranks, {job.layout.batch_size} samples a step, {plan.steps} steps, hardware={hardware}",
        "usable GiB": job.memory / 2**30,
        "columns": [name for name in (rows[0] if rows else ()) if name not in _DETAILS],
        "candidates": rows,
        "refused": refused,
    }
    with atomic_write(folder / "plan.json") as file:
        file.write_text(json.dumps(content, indent=1))
    Console(width=None if sys.stdout.isatty() else 180).print(_table(content["columns"], rows[:_SHOWN]))
    if rows and rows[0]["why not"]:
        print(f"No candidate fits. {ADVICE}")
    for error, names in refused.items():
        print(f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {error}")
    print(f"{content['title']}; {folder / 'plan.json'}")
    if cfg.report:
        try:
            # Here, so that a template without reports plans as well.
            from onecurve.extras.report.plan_page import write_plan_page

            print(write_plan_page(folder, content))
        except ModuleNotFoundError as error:
            print(f"no plan.html: {error}; pip install '.[report]', or set report=false", file=sys.stderr)


def _row(one: Candidate, step: Estimate, plan: Plan) -> dict[str, Any]:
    """Return what plan.json has of a candidate; MB are those that its busiest rank sends in a step."""
    job, price = plan.job, plan.job.hardware.price_per_hour
    within, between = (
        sum(c.sent for c in step.collectives if c.is_within_host(job) == is_within) / 1e6 for is_within in (True, False)
    )
    hours = step.step_ms / 1000 * plan.steps / 3600
    return {
        "strategy": one.name,
        "GiB": step.nbytes / 2**30,
        "MB within": within,
        "MB between": between,
        "step_ms": step.step_ms,
        "bubble": f"{1000 * step.seconds.get('bubble', 0.0) / step.step_ms:.0%}",
        "efficiency": f"{plan.single.step_ms / step.step_ms / job.ranks:.0%}" if plan.single else "",
        "hours": hours,
        **({"price": hours * job.ranks * price} if price else {}),
        "why not": one.reason,
        "options": one.options,
        "memory": step.memory,
        "seconds": step.seconds,
        "collectives": [vars(collective) for collective in step.collectives],
    }


def _table(columns: list[str], rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None)
    for name in columns:
        layout: Any = {"min_width": 24} if name in _TEXTS else {"min_width": max(7, len(name)), "justify": "right"}
        table.add_column(name, no_wrap=True, **layout)
    for row in rows:
        cells = [row[name] for name in columns]
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else escape(str(cell)) for cell in cells))
    return table
