"""The page of a sweep: the jobs, their options and results, and the curves of their metric."""

from collections import Counter
from pathlib import Path

from markupsafe import Markup

from onecurve.extras.jobs import Sweep
from onecurve.extras.report.metric_charts import downsample, style_value_axis
from onecurve.extras.report.page import Section, chart, duration_text, macros, new_figure, number, parts, write_page
from onecurve.extras.report.run_folder import read_metrics
from onecurve.extras.report.run_page import REPORT
from onecurve.records.events import ENDS
from onecurve.records.files import METRICS

_SHOWN = ("val/acc", "test/acc", "train/loss")  # metrics that the table shows besides the optimized one
_CURVE_POINTS = 200  # buckets of the curve of a job


def write_sweep_page(folder: Path, scripts: Path | None) -> Path:
    """Write the page of the sweep in `folder`; return its path. `scripts` is that of `write_page`."""
    sweep = Sweep(folder)
    failed = [(name, job.error.strip()) for name, job in sweep.jobs.items() if job.error]
    sections = [
        Section("Jobs", parts.grid([_job_table(sweep)]), "A click on a column sorts the table."),
        Section("Curves", parts.grid([_curves(sweep)])),
        Section("Seeds", parts.grid([_seeds(sweep)])),
        Section("Failures", parts.grid([macros("sweep").failures(failed)])),
    ]
    return write_page(sweep.path / REPORT, "Sweep", sweep.path.name, _lead(sweep), sections, scripts)


def _lead(sweep: Sweep) -> Markup:
    statuses = Counter(job.end for job in sweep.jobs.values())
    sentence = f"All jobs took {duration_text(sum(job.seconds for job in sweep.jobs.values()))}."
    if ranked := sweep.ranked:
        sentence += f" The best is job {ranked[-1]} with {sweep.metric} {number(sweep.jobs[ranked[-1]].result)}."
    return macros("sweep").lead(statuses, ENDS, sentence)


def _job_table(sweep: Sweep) -> Markup:
    page, jobs = macros("sweep"), sweep.jobs.values()
    metrics = [name for name in _SHOWN if name != sweep.metric and any(name in job.metrics for job in jobs)]
    rows = [
        [
            page.job_link(name, REPORT if (sweep.path / name / REPORT).is_file() else ""),
            " ".join(overrides),
            job.result,
            *(job.metrics.get(name) for name in metrics),
            round(job.seconds, 1),
            page.status(ENDS.get(job.end, ""), job.end),
        ]
        for (name, job), overrides in zip(sweep.jobs.items(), sweep.overrides, strict=True)
    ]
    columns = ["job", "overrides", sweep.metric, *metrics, "seconds", "status"]
    return parts.card("", parts.table(columns, rows, sortable=True), wide=True)


def _seeds(sweep: Sweep) -> Markup:
    """Return mean and standard deviation of the jobs that differ only in the seed."""
    rows = [list(row.values()) for row in sweep.seed_rows()]
    table = parts.table(["overrides", "seeds", "mean", "standard deviation"], rows, sortable=True)
    return parts.card(f"Mean and standard deviation of {sweep.metric}", table, wide=True) if rows else Markup()


def _curves(sweep: Sweep) -> Markup:
    """Return the curve of the metric in each job, the best one in a color of its own."""
    figure, drawn, ranked = new_figure(320, hovermode="closest"), [], sweep.ranked
    for name in ranked:
        curve = read_metrics(sweep.path / name / METRICS).get(sweep.metric)
        if curve is None or len(curve.values) < 2:
            continue
        drawn.append(curve)
        label, color, width = ("best job", 2, 2.2) if name == ranked[-1] else ("other jobs", 9, 1.3)
        shown, line = downsample(curve, _CURVE_POINTS), {"color": f"var(--s{color})", "width": width}
        template = f"job {name}, step %{{x}}: %{{y:.4g}}<extra></extra>"
        figure.add_scatter(x=shown.steps, y=shown.values, mode="lines", name=label, line=line, hovertemplate=template)
    if not drawn:
        return Markup()
    figure.update_xaxes(title="step")
    style_value_axis(figure, sweep.metric, drawn)
    return chart(figure, f"{sweep.metric} of each job")
