"""The search that `hydra/sweeper=optuna` describes.

Its settings, `optuna/`, are those of Hydra's plug-in for Optuna 2, which is not needed: users'
files and command lines hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.base import lacking
from launcher.config.errors import ConfigError, advice
from launcher.config.overrides import parse
from launcher.config.sources import SWEEPER

OPTUNA = "optuna"  # the option of the group, and its `_target_`
_OF_OPTUNA = "optuna.samplers."  # a sampler's `_target_` without its class
_OPTIONS = (
    *("direction", "n_trials", "n_jobs", "max_failure_rate", "params", "search_space", "storage"),
    *("study_name", "custom_search_space", "sampler", "_target_"),
)
_REFUSED = {
    "CmaEsSampler": "keeps its state as a pickle in the journal, and no file is unpickled",
    "MOTPESampler": "has left Optuna, whose tpe does the same",
}


class Space(NamedTuple):
    """What a sweep by Optuna searches, and how.

    Attributes:
        values: Optuna's distributions, by setting.
        fixed: words for the settings of a file that have one value.
        sampler: makes Optuna's sampler of the trial with a number, the same in any process.
        direction: whether the least result is the best.
        trials: how many points to try.
        jobs: how many at a time.
        max_failure_rate: the share of failed trials above which no more are begun.
        name: the study's name.
    """

    values: Mapping[str, Any]
    fixed: tuple[str, ...]
    sampler: Callable[[int], Any]
    direction: Literal["minimize", "maximize"]
    trials: int
    jobs: int
    max_failure_rate: float
    name: str

    def words(self, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the settings of a point as `key=value`."""
        texts = {name: "null" if value is None else value for name, value in chosen.items()}
        return (*(f"{name}={texts[name]}" for name in self.values), *self.fixed)

    def ends(self) -> list[tuple[str, ...]]:
        """Return the points of all first values, and of all last ones."""
        ends = {k: getattr(v, "choices", None) or (v.low, v.high) for k, v in self.values.items()}
        return [self.words({name: each[n] for name, each in ends.items()}) for n in (0, -1)]


def read_space(sweeper: DictConfig, swept: Sequence[Override], loader: ConfigLoader) -> Space:
    """Return the search that `hydra.sweeper` and the swept settings of a command line describe.

    Raises:
        ConfigError: Optuna is not installed, or cannot search that.
    """
    if command := lacking("optuna"):
        remedy = f"Install it with: {command}."
        raise ConfigError("hydra/sweeper=optuna needs Optuna, which is not installed", remedy, ())
    _check(sweeper)
    texts = sweeper.params or {k: _typed(k, v) for k, v in (sweeper.search_space or {}).items()}
    overrides = [*parse([f"{name}={text}" for name, text in texts.items()], loader), *swept]
    found = {override.get_key_element(): override for override in overrides}
    values = {name: _values(one) for name, one in found.items() if one.is_sweep_override()}
    if not values:
        remedy = "Give settings several values: optimizer.learning_rate=interval(1e-4,1e-2)."
        raise ConfigError("hydra/sweeper=optuna has nothing to search", remedy)
    kind, options = _sampler(cast(dict[str, Any], OmegaConf.to_container(sweeper.sampler)))
    trials = sweeper.n_trials
    if kind == "GridSampler":
        grid = options["search_space"] = {name: _listed(name, v) for name, v in values.items()}
        trials = min(trials, math.prod(map(len, grid.values())))
    make = partial(_make, kind, options)
    make(0)
    return Space(
        values=values,
        fixed=tuple(one.input_line or "" for key, one in found.items() if key not in values),
        sampler=make,
        direction=sweeper.direction,
        trials=trials,
        jobs=sweeper.n_jobs,
        max_failure_rate=sweeper.max_failure_rate,
        name=sweeper.study_name or "launcher",
    )


def _check(sweeper: DictConfig) -> None:
    for key in map(str, sweeper):
        if key not in _OPTIONS:
            raise _refused(key, "is not a setting", advice(key, _OPTIONS))
    for key, kind in (("n_trials", int), ("n_jobs", int), ("max_failure_rate", int | float)):
        if not isinstance(sweeper[key], kind) or sweeper[key] < (key == "n_jobs"):
            raise _refused(key, f"cannot be {sweeper[key]}", "Write a number that is large enough.")
    if sweeper.custom_search_space is not None:
        raise _refused("custom_search_space", "runs code, and would in each job", "Use params.")
    if sweeper.direction not in ("minimize", "maximize"):
        remedy = "Use minimize or maximize, of the one result of a run: sweep.objective."
        raise _refused("direction", f"cannot be {sweeper.direction}", remedy)


def _values(override: Override) -> Any:
    """Return the distribution that a sweep of Hydra's grammar stands for."""
    from optuna.distributions import CategoricalDistribution

    said = cast(Any, override.value())
    try:
        if isinstance(said, IntervalSweep):
            return _numbers(said.start, said.end, log="log" in said.tags)
        if isinstance(said, RangeSweep) and not said.shuffle:
            return _numbers(said.start, said.stop, step=said.step)
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


def _typed(name: str, said: Any) -> str:
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


def _sampler(said: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a sampler's class, and its arguments."""
    target = str(said.pop("_target_"))
    said.pop("_partial_", None)
    kind = target.removeprefix(_OF_OPTUNA)
    if kind in _REFUSED:
        raise _refused("sampler", f"({kind}) {_REFUSED[kind]}", "Use hydra/sweeper/sampler=tpe.")
    if not target.startswith(_OF_OPTUNA) or not kind.isidentifier():
        raise _refused("sampler", f"({target}) is none of optuna.samplers", "Name one of these.")
    options = {key: value for key, value in said.items() if value is not None}
    for key, value in options.items():
        if not isinstance(value, bool | int | float | str):
            raise _refused(f"sampler.{key}", "is no plain value", "Leave it out.")
    return kind, options


def _make(kind: str, options: Mapping[str, Any], number: int) -> Any:
    import numpy as np
    import optuna

    options = dict(options)
    if "seed" in options and kind != "QMCSampler":  # the trials of that one share a sequence
        words = np.random.SeedSequence([options["seed"], number]).generate_state(1)
        options["seed"] = int(words[0])
    try:
        return getattr(optuna.samplers, kind)(**options)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        remedy = "Use hydra/sweeper/sampler=tpe, or correct its options."
        raise _refused("sampler", f"({kind}) cannot be made: {error}", remedy) from None


def _refused(name: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"{SWEEPER}.{name} {why}", remedy, [f"{SWEEPER}.{name}"])
