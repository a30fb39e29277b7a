"""The search that `hydra/sweeper=optuna` describes.

Its settings, `optuna/`, are those of Hydra's plug-in for Optuna 2, which is not needed: users'
files and command lines hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.base import installing
from launcher.config.errors import ConfigError, advice
from launcher.config.schema import Config
from launcher.config.sections import MAXIMIZED
from launcher.config.sources import SWEEPER

OPTUNA = "optuna"  # the option of the group, and its `_target_`
_OPTIONS = (
    *("direction", "n_trials", "n_jobs", "max_failure_rate", "params", "search_space", "storage"),
    *("study_name", "custom_search_space", "sampler", "_target_"),
)
_NUMBERS = (("n_trials", int, 1), ("n_jobs", int, 1), ("max_failure_rate", int | float, 0))
_SAMPLERS = {  # options of hydra/sweeper/sampler
    "TPESampler": "tpe",
    "RandomSampler": "random",
    "NSGAIISampler": "nsgaii",
    "GridSampler": "grid",
}


class Space(NamedTuple):
    """What a sweep by Optuna searches, and how.

    Attributes:
        values: Optuna's distributions, by setting.
        sampler: the name of the sampler's class.
        options: the sampler's arguments.
        direction: `minimize` or `maximize`; None until it is `settled`, like a seed of None.
        trials: how many points to try.
        jobs: how many at a time; 0 until it is `settled`.
        max_failure_rate: the share of failed trials above which no more are begun.
        name: the study's name.
    """

    values: Mapping[str, Any]
    sampler: str
    options: Mapping[str, Any]
    direction: Literal["minimize", "maximize"] | None
    trials: int
    jobs: int
    max_failure_rate: float
    name: str

    def settled(self, config: Config) -> Space:
        """Return the search with what the settings of its runs say of it where it does not."""
        options = dict(self.options)
        if options.get("seed", 0) is None:
            options["seed"] = config.run.seed
        return self._replace(
            options=options,
            direction=self.direction
            or ("maximize" if config.sweep.objective in MAXIMIZED else "minimize"),
            jobs=self.jobs or config.sweep.jobs,
        )

    def make_sampler(self, number: int) -> Any:
        """Return Optuna's sampler of the trial with a number, the same in any process."""
        import numpy as np
        import optuna

        options = dict(self.options)
        if options.get("seed") is not None:
            words = np.random.SeedSequence([options["seed"], number]).generate_state(1)
            options["seed"] = int(words[0])
        return getattr(optuna.samplers, self.sampler)(**options)

    def words(self, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the settings of a point as `key=value`."""
        texts = {name: "null" if value is None else value for name, value in chosen.items()}
        return tuple(f"{name}={texts[name]}" for name in self.values)

    def ends(self) -> list[tuple[str, ...]]:
        """Return the points of all first values, and of all last ones."""
        ends = {k: getattr(v, "choices", None) or (v.low, v.high) for k, v in self.values.items()}
        return [self.words({name: each[n] for name, each in ends.items()}) for n in (0, -1)]


def read_space(sweeper: DictConfig, swept: Sequence[Override]) -> Space:
    """Return the search that `hydra.sweeper` and the swept settings describe.

    Raises:
        ConfigError: Optuna is not installed, or cannot search that.
    """
    try:
        import optuna.storages.journal  # older ones do not have it
    except ImportError:
        remedy = f"Install it with: {installing('optuna')}."
        problem = "hydra/sweeper=optuna needs Optuna 5, which is not installed"
        raise ConfigError(problem, remedy, ()) from None
    _check(sweeper)
    (kind, options), trials = _sampler(sweeper.sampler), sweeper.n_trials
    if not any(one.is_sweep_override() for one in swept):
        remedy = "Give settings several values: optimizer.learning_rate=interval(1e-4,1e-2)."
        raise ConfigError("hydra/sweeper=optuna has nothing to search", remedy)
    values = {one.get_key_element(): _values(one) for one in swept}
    if kind == "GridSampler":
        grid = options["search_space"] = {name: _listed(name, v) for name, v in values.items()}
        trials = min(trials, math.prod(map(len, grid.values())))
    space = Space(
        values=values,
        sampler=kind,
        options=options,
        direction=sweeper.direction,
        trials=trials,
        jobs=sweeper.n_jobs or 0,
        max_failure_rate=sweeper.max_failure_rate,
        name=str(sweeper.study_name or "launcher"),
    )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        optuna.create_study(sampler=space.make_sampler(0)).ask(dict(values))  # tries the options
    except (TypeError, ValueError) as error:
        raise _refused("sampler", f"does not work: {error}", "Correct its options.") from None
    return space


def refuse_unknown(sweeper: DictConfig, known: Sequence[str]) -> None:
    """Raise ConfigError for a setting of `hydra.sweeper` that it does not have."""
    for key in map(str, sweeper):
        if key not in known:
            raise _refused(key, "is not a setting", advice(key, known))


def _check(sweeper: DictConfig) -> None:
    refuse_unknown(sweeper, _OPTIONS)
    for key, kind, least in _NUMBERS:
        is_right = isinstance(sweeper[key], kind) and sweeper[key] >= least
        if not is_right and (key, sweeper[key]) != ("n_jobs", None):
            raise _refused(key, f"cannot be {sweeper[key]}", f"Write a number from {least} on.")
    if sweeper.direction not in ("minimize", "maximize", None):
        remedy = "Use minimize or maximize, of the one result of a run: sweep.objective."
        raise _refused("direction", f"cannot be {sweeper.direction}", remedy)
    if sweeper.custom_search_space is not None:
        raise _refused("custom_search_space", "runs code, and would in each job", "Use params.")
    if sweeper.storage is not None:
        remedy = "Leave it out: the trials are in optuna.journal in the sweep's folder."
        raise _refused("storage", "would be a second record of the trials", remedy)


def _sampler(sampler: DictConfig) -> tuple[str, dict[str, Any]]:
    """Return the name of a sampler's class, and its arguments that are not null, but for a seed."""
    is_table = isinstance(sampler, DictConfig)
    said: Any = OmegaConf.to_container(sampler) if is_table else {"_target_": sampler}
    target = str(said.pop("_target_", None))
    said.pop("_partial_", None)
    kind = target.removeprefix("optuna.samplers.")
    if kind not in _SAMPLERS:
        remedy = f"Use hydra/sweeper/sampler={' | '.join(_SAMPLERS.values())}."
        raise _refused("sampler", f"is {target}, which is not supported", remedy)
    return kind, {k: value for k, value in said.items() if value is not None or k == "seed"}


def _values(override: Override) -> Any:
    """Return the distribution that a sweep of Hydra's grammar stands for."""
    from optuna.distributions import CategoricalDistribution

    said = cast(Any, override.value())
    try:
        if isinstance(said, IntervalSweep):
            return _numbers(said.start, said.end, log="log" in said.tags)
        if isinstance(said, RangeSweep) and not said.shuffle:
            return _numbers(said.start, said.stop, step=said.step)
        if not override.is_sweep_override():
            return CategoricalDistribution([override.get_value_element_as_str()])
        choices: list[Any] = [*override.sweep_iterator(Transformer.encode)]
        return CategoricalDistribution(choices)
    except (HydraException, ValueError) as error:
        remedy = "Write interval(low,high), range(start,stop,step) or values with commas."
        problem = f"{override.input_line} cannot be searched: {error}"
        raise ConfigError(problem, remedy, code="wrong_value") from None


def _numbers(low: Any, high: Any, step: Any = None, log: bool = False) -> Any:
    from optuna.distributions import FloatDistribution, IntDistribution

    if all(isinstance(each, int) for each in (low, high, step or 1)):
        return IntDistribution(low, high, log=log, step=step or 1)
    return FloatDistribution(low, high, log=log, step=step)


def typed(name: str, said: Any) -> str:
    """Return an entry of `hydra.sweeper.search_space`, the older way, as it stands in `params`."""
    try:
        if said["type"] == "categorical":
            return f"choice({','.join(map(str, said['choices']))})"
        low, high = ({"int": int, "float": float}[said["type"]](said[k]) for k in ("low", "high"))
        if said.get("step") is not None:
            return f"range({low},{high},{said['step']})"
        return f"tag(log,interval({low},{high}))" if said.get("log") else f"interval({low},{high})"
    except (KeyError, TypeError, ValueError, OmegaConfBaseException):
        remedy = "It takes type (int, float or categorical), low, high, step and log, or choices."
        raise _refused(f"search_space.{name}", "cannot be read", remedy) from None


def _listed(name: str, values: Any) -> list[Any]:
    """Return all values of a setting, for a grid; the end of a range is not one of them."""
    if choices := getattr(values, "choices", None):
        return list(choices)
    if values.step is None:
        remedy = "Give it choices or a step, or use another sampler."
        raise ConfigError(f"{name} has too many values for a grid", remedy)
    count = int((values.high - values.low) // values.step)
    return [values.low + n * values.step for n in range(max(count, 1))]


def _refused(name: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"{SWEEPER}.{name} {why}", remedy, [f"{SWEEPER}.{name}"])
