"""Optuna's own plots of a study, in the colors of the page."""

from typing import Any

from src.report.markup import Html, chart
from src.report.sweep import Sweep

_SCALE = [[0, "var(--heat1)"], [1, "var(--heat4)"]]


def optuna_plots(sweep: Sweep) -> list[Html]:
    """Return importance, history and slices of the sweep's study; nothing if it has no two finished trials.

    Raises:
        Exception: whatever the storage raises if it cannot be read.
    """
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
    return [
        _chart(importance, "Importance", "By PED-ANOVA.", 60 + 40 * options),
        _chart(history, "History", "The best result so far.", 280),
        _chart(
            visualization.plot_slice(study, target_name=sweep.metric),
            "Each option",
            "A stronger color is a later trial.",
            300,
            wide=True,
            min_width=240 * options,
        ),
    ]


def is_optuna(sweep: Sweep) -> bool:
    """Return whether Optuna has chosen the jobs."""
    return "optuna" in str(sweep.sweeper.get("_target_", "")).lower()


def _chart(figure: Any, title: str, note: str, height: int, **options: Any) -> Html:
    """Return one of Optuna's figures without its own colors and title."""
    figure.update_layout(title=None, plot_bgcolor=None, height=height, hovermode="closest")
    for index, trace in enumerate(figure.data):
        color = f"var(--s{index % 10 + 1})"
        if trace.type == "bar":
            trace.update(marker={"color": "var(--s1)", "line": None}, cliponaxis=False)
        elif trace.marker.colorscale:  # the color is the number of the trial
            trace.marker.update(colorscale=_SCALE, showscale=False, line={"color": "var(--line)", "width": 1}, size=8)
        else:
            trace.update(marker={"color": color}, line={"color": color})
    return chart(figure, title, note, **options)
