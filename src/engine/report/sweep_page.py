"""The page of a sweep; if Optuna has chosen the jobs, it has Optuna's own plots of the study."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from src.engine.report.page import Section, chart, duration_text, macros, number, parts, series_color, write_page
from src.engine.report.run_page import REPORT
from src.engine.report.sweep import Sweep, curves, seeds
from src.engine.state.jobs import last_line

_SCALE = [[0, "var(--heat1)"], [1, "var(--heat4)"]]  # of Optuna's plots
_COLORS = {"finished": "good", "failed": "bad", "killed": "bad", "stopped": "warn"}
_SHOWN = ("val/acc", "test/acc", "train/loss")  # metrics that the table shows besides the optimized one


def write_sweep_page(folder: Path, scripts: Path | None) -> Path:
    """Write the page of the sweep in `folder`; return its path. `scripts` is that of `write_page`."""
    sweep = Sweep(folder)
    charts = [curves(sweep), *_optuna_charts(sweep)]
    sections = [
        Section("Jobs", parts.grid([_job_table(sweep)]), "A click on a column sorts the table."),
        Section("Results", parts.grid(charts)),
        Section("Seeds", parts.grid([seeds(sweep)])),
        Section("Failures", parts.grid([macros("sweep").failures(sweep.jobs)])),
    ]
    return write_page(sweep.path / REPORT, "Sweep", sweep.path.name, _lead(sweep), sections, scripts)


def _optuna_charts(sweep: Sweep) -> list[Markup]:
    """Return Optuna's own plots, if it has chosen the jobs."""
    if "optuna" not in str(sweep.sweeper.get("_target_", "")).lower():
        return []
    try:
        return optuna_plots(sweep)
    except Exception as error:  # a storage raises errors of its own library
        return [macros("sweep").unreadable(last_line(str(error)))]


def _lead(sweep: Sweep) -> Markup:
    statuses = Counter(job.status for job in sweep.jobs)
    best = sweep.ranked[-1] if sweep.ranked else None
    return macros("sweep").lead(statuses, _COLORS, best, list(_key_figures(sweep)))


def _key_figures(sweep: Sweep) -> Iterable[tuple[str, str, str]]:
    yield "Jobs", str(len(sweep.jobs)), ""
    if ranked := sweep.ranked:
        yield f"Best {sweep.metric}", number(ranked[-1].job.result), f"job {ranked[-1].name}"
        yield f"Median {sweep.metric}", number(median(job.job.result or 0.0 for job in ranked)), ""
    yield "Time of all jobs", duration_text(sum(job.job.seconds for job in sweep.jobs)), ""


def _job_table(sweep: Sweep) -> Markup:
    page = macros("sweep")
    metrics = [name for name in _SHOWN if name != sweep.metric and any(name in job.job.metrics for job in sweep.jobs)]
    rows = [
        [
            page.job_link(job.name, REPORT if (sweep.path / job.name / REPORT).is_file() else ""),
            *(_value(job.options.get(option)) for option in sweep.options),
            job.job.result,
            *(job.job.metrics.get(name) for name in metrics),
            round(job.job.seconds, 1),
            page.status(_COLORS.get(job.status, ""), job.status),
        ]
        for job in sweep.jobs
    ]
    columns = ["job", *sweep.options, sweep.metric, *metrics, "seconds", "status"]
    return parts.card("", parts.table(columns, rows, sortable=True), wide=True)


def _value(value: str | None) -> Any:
    """Return the value of an option, as a number if it is one."""
    try:
        return float(value) if value is not None else None
    except ValueError:
        return value


def optuna_plots(sweep: Sweep) -> list[Markup]:
    """Return importance, history and slices of the sweep's study; nothing if it has no two finished trials."""
    import optuna
    from optuna.trial import TrialState

    storage = sweep.sweeper.get("storage") or f"sqlite:///{sweep.path}/optuna.db"
    study = optuna.load_study(study_name=sweep.sweeper.get("study_name") or sweep.path.name, storage=storage)
    finished = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    if len(finished) < 2:
        return []
    from optuna import visualization

    options = len({name for trial in finished for name in trial.params})
    history = visualization.plot_optimization_history(study, target_name=sweep.metric)
    importance = visualization.plot_param_importances(study).update_layout(xaxis_title=None, yaxis_title=None)
    slices = visualization.plot_slice(study, target_name=sweep.metric)
    later = "A stronger color is a later trial."
    return [
        _chart(importance, "Importance", "By PED-ANOVA.", 60 + 40 * options),
        _chart(history, "History", "The best result so far.", 280),
        _chart(slices, "Each option", later, 300, wide=True, min_width=240 * options),
    ]


def _chart(figure: Any, title: str, note: str, height: int, **options: Any) -> Markup:
    """Return one of Optuna's figures without its own colors and title."""
    figure.update_layout(title=None, plot_bgcolor=None, height=height, hovermode="closest")
    for index, trace in enumerate(figure.data):
        color = series_color(index)
        if trace.type == "bar":
            trace.update(marker={"color": "var(--s1)", "line": None}, cliponaxis=False)
        elif trace.marker.colorscale:  # the color is the number of the trial
            trace.marker.update(colorscale=_SCALE, showscale=False, line={"color": "var(--line)", "width": 1}, size=8)
        else:
            trace.update(marker={"color": color}, line={"color": color})
    return chart(figure, title, note, **options)
