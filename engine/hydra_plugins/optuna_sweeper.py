"""`hydra/sweeper=optuna`: Optuna proposes the jobs, receives their results, and continues an interrupted sweep.

Hydra finds sweepers in the namespace package `hydra_plugins` only (https://hydra.cc/docs/advanced/plugins/develop/).
Hydra's stable plugin (hydra-optuna-sweeper 1.3.0) is for Optuna 2, whose storage fails with today's SQLAlchemy. It
neither prunes trials nor continues a sweep in its folder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from onecurve.config.command_line import quote
from onecurve.errors import UserError
from onecurve.extras.jobs import Job

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

_log = logging.getLogger(__name__)
_SWEEP = "sweep"  # user attribute of a trial: the folder of its sweep


class OptunaSweeper(Sweeper):
    """Sweeper that asks Optuna for trials and tells it their results; `storage` keeps the study."""

    def __init__(
        self,
        n_trials: int,
        n_jobs: int,
        direction: Any,
        storage: str | None,
        study_name: str | None,
        sampler: Any,
        params: dict[str, Any] | None = None,
    ) -> None:
        self.n_trials, self.n_jobs, self.direction = n_trials, n_jobs, direction
        self.params = params or {}
        self.storage, self.study_name, self.sampler = storage, study_name, sampler

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)
        self.folder = Path(config.hydra.sweep.dir).absolute()
        self.storage = self.storage or f"sqlite:///{self.folder}/optuna.db"
        self.study_name = self.study_name or self.folder.name

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials that remain of `n_trials`.

        Raises:
            UserError: if no override leaves Optuna a choice, or a finished trial has no `optimized_metric`.
        """
        import optuna

        self.folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, self.folder / "multirun.yaml")  # as Hydra's own sweeper does
        given = {argument.partition("=")[0] for argument in arguments}
        recipe = [f"{name}={value}" for name, value in self.params.items() if name not in given]
        space, self.fixed = search_space(OverridesParser.create().parse_overrides([*recipe, *arguments]))
        if not space:
            raise UserError(
                "hydra/sweeper=optuna has nothing to choose: give an option as 'interval(a,b)', or several values"
            )
        study = optuna.create_study(
            study_name=self.study_name,
            storage=self.storage,
            sampler=self.sampler,
            direction=self.direction,
            load_if_exists=True,
        )
        if study.get_trials(deepcopy=False):
            study.sampler.reseed_rng()  # its fixed seed would propose the same points again
        interrupted = [trial for trial in self._trials_of_sweep(study) if not trial.state.is_finished()]
        self._run(study, {trial.number: trial.params for trial in interrupted})
        while (remaining := self.n_trials - len(self._trials_of_sweep(study))) > 0:
            trials = [study.ask(space) for _ in range(min(remaining, self.n_jobs))]
            for trial in trials:
                trial.set_user_attr(_SWEEP, str(self.folder))
            self._run(study, {trial.number: trial.params for trial in trials})
        self._log_best(study)

    def _trials_of_sweep(self, study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
        """Return the trials of this sweep; a shared storage may contain trials of other sweeps."""
        return [trial for trial in study.get_trials(deepcopy=False) if trial.user_attrs.get(_SWEEP) == str(self.folder)]

    def _run(self, study: optuna.Study, trials: dict[int, dict[str, Any]]) -> None:
        """Run the trials, given as parameters by trial number, and report their results to the study."""
        if not trials:
            return
        batch = [self._trial_overrides(number, params) for number, params in trials.items()]
        self.validate_batch_is_legal(batch)
        returns = self.launcher.launch(batch, initial_job_idx=min(trials))
        for number, job_return in zip(trials, returns, strict=True):
            assert job_return.hydra_cfg is not None
            self._tell_result(study, number, Path(job_return.hydra_cfg.hydra.runtime.output_dir))

    def _trial_overrides(self, number: int, params: dict[str, Any]) -> list[str]:
        chosen = [f"{name}={value}" for name, value in params.items()]
        address = f"{{storage:{quote(self.storage)},study:{quote(self.study_name)},number:{number}}}"
        return [*self.fixed, *chosen, f"runtime.trial={address}"]

    def _tell_result(self, study: optuna.Study, number: int, folder: Path) -> None:
        """Report the outcome of a trial's job to Optuna.

        Raises:
            UserError: if the job has finished without the metric to optimize.
        """
        from optuna.trial import TrialState

        from onecurve.extras.sweeps.pruning import PRUNED

        job = Job.read(folder)
        if job.status == "finished" and study.get_trials(deepcopy=False)[number].user_attrs.get(PRUNED):
            job.status = "pruned"
            job.write(folder)
        if job.status != "finished":
            study.tell(number, state=TrialState.PRUNED if job.status == "pruned" else TrialState.FAIL)
        elif job.result is None:
            raise UserError(f"optimized_metric: trial {number} has no such metric; it has {', '.join(job.metrics)}")
        else:
            study.tell(number, job.result)

    def _log_best(self, study: optuna.Study) -> None:
        with suppress(ValueError):  # no trial is complete
            best = study.best_trial
            params = " ".join(f"{name}={value}" for name, value in best.params.items())
            _log.info("best: trial %d with %.4f: %s", best.number, best.value, params)


def search_space(overrides: Iterable[Override]) -> tuple[dict[str, BaseDistribution], list[str]]:
    """Return the distribution of each option that Optuna chooses, and the overrides that all trials share."""
    space: dict[str, BaseDistribution] = {}
    fixed = []
    for override in overrides:
        name = override.get_key_element()
        if override.is_sweep_override():
            space[name] = _distribution(override)
        else:
            fixed.append(name if override.is_delete() else f"{name}={override.get_value_element_as_str()}")
    return space, fixed


def _distribution(override: Override) -> BaseDistribution:
    """Return the distribution of one override.

    It can be `interval(a,b)` or `int(interval(a,b))`, each also in `tag(log, ...)`, `range(a,b,step)`, or a choice.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value: Any = override.value()
    if not isinstance(value, IntervalSweep | RangeSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    options: dict[str, Any]
    if isinstance(value, IntervalSweep):
        low, high, options = value.start, value.end, {"log": "log" in value.tags}
    else:
        points = list(value.range())
        if not points:
            raise UserError(f"{override.input_line}: give a range that rises")
        low, high, options = points[0], points[-1], {"step": value.step}
    kind: Any = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
    try:
        return kind(low, high, **options)
    except ValueError as error:
        raise UserError(f"{override.input_line}: {error}") from error
