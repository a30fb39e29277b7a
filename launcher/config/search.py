"""The search that `hydra/sweeper=optuna` describes, as plain data.

Its settings, `optuna/`, are those of Hydra's plug-in for Optuna 2, which is not needed: users'
files and command lines hold. Nothing of Optuna is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf

from launcher.config.errors import ConfigError, advice
from launcher.config.overrides import COMMAND_LINE, parse
from launcher.config.sources import SWEEPER, SWEEPER_GROUP

OPTUNA = "optuna"  # the option of the group, and its `_target_`
_OF_OPTUNA = "optuna.samplers."  # a sampler's `_target_` without its class
# Classes of samplers that cannot serve here, and why.
_REFUSED = {
    "CmaEsSampler": "keeps its state as a pickle in the journal, and no file is unpickled",
    "MOTPESampler": "has left Optuna, whose tpe does the same",
}


_OPTIONS = (
    *("direction", "n_trials", "n_jobs", "max_failure_rate", "params", "search_space", "storage"),
    *("study_name", "custom_search_space", "sampler", "_target_"),
)


@dataclass(frozen=True)
class Values:
    """The values of a swept setting: `choices`, or numbers from `low` to `high`.

    Attributes:
        choices: the values; () where they are numbers of an interval.
        low: the least number.
        high: the largest one; both are whole if all between them are to be.
        step: the distance of neighbours; None: any number, or 1 for whole ones.
        log: whether to search by orders of magnitude.
    """

    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False

    @property
    def ends(self) -> tuple[Any, Any]:
        """The first and the last value."""
        return (self.choices[0], self.choices[-1]) if self.choices else (self.low, self.high)


@dataclass(frozen=True)
class Space:
    """What a sweep by Optuna searches, and how.

    Attributes:
        values: what is searched, by setting.
        fixed: words for the settings of a file that have one value.
        sampler: the name of a class in `optuna.samplers`.
        options: its arguments.
        direction: `minimize` or `maximize`.
        trials: how many points to try.
        jobs: how many at a time.
        max_failure_rate: the share of failed trials above which no more are begun.
        name: the study's name.
    """

    values: Mapping[str, Values]
    fixed: tuple[str, ...]
    sampler: str
    options: Mapping[str, Any]
    direction: Literal["minimize", "maximize"]
    trials: int
    jobs: int
    max_failure_rate: float
    name: str

    def words(self, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the settings of a point as `key=value`."""
        texts = {name: "null" if value is None else value for name, value in chosen.items()}
        return (*(f"{name}={texts[name]}" for name in self.values), *self.fixed)

    def ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the points of all first values, and of all last ones."""
        first, last = ({k: v.ends[n] for k, v in self.values.items()} for n in (0, 1))
        return self.words(first), self.words(last)


def read_space(sweeper: DictConfig, swept: Sequence[Override], loader: ConfigLoader) -> Space:
    """Return the search that `hydra.sweeper` and the swept settings of a command line describe.

    Raises:
        ConfigError: it holds what Optuna cannot search, or what cannot be kept here.
    """
    for key in sweeper:
        if key not in _OPTIONS:
            raise _refused(str(key), "is not a setting", advice(str(key), _OPTIONS))
    for key, kind in (("n_trials", int), ("n_jobs", int), ("max_failure_rate", int | float)):
        if not isinstance(sweeper[key], kind) or isinstance(sweeper[key], bool) or sweeper[key] < 0:
            raise _refused(key, "must be a number, and not below 0", "Correct it.")
    if sweeper.custom_search_space is not None:
        raise _refused("custom_search_space", "runs code, and would in each job", "Use params.")
    texts = [f"{name}={values}" for name, values in (sweeper.params or {}).items()]
    found = {one.get_key_element(): one for one in [*parse(texts, loader), *swept]}
    values = {} if texts else {k: _described(k, v) for k, v in _table(sweeper.search_space).items()}
    values |= {key: _values(one) for key, one in found.items() if one.is_sweep_override()}
    fixed = {key: one for key, one in found.items() if not one.is_sweep_override()}
    if not values:
        raise ConfigError(
            "hydra/sweeper=optuna has nothing to search",
            "Give settings several values: optimizer.learning_rate=interval(1e-4,1e-2).",
            where=COMMAND_LINE,
        )
    values = {name: each for name, each in values.items() if name not in fixed}
    sampler, options = _sampler(_table(sweeper.sampler))
    trials = sweeper.n_trials
    if sampler == "GridSampler":
        grid = {name: _listed(name, each) for name, each in values.items()}
        options["search_space"] = grid
        trials = min(trials, math.prod(map(len, grid.values())))
    return Space(
        values=values,
        fixed=tuple(f"{key}={one.get_value_element_as_str()}" for key, one in fixed.items()),
        sampler=sampler,
        options=options,
        direction=_direction(sweeper.direction),
        trials=trials,
        jobs=sweeper.n_jobs,
        max_failure_rate=sweeper.max_failure_rate,
        name=sweeper.study_name or "launcher",
    )


def _table(node: Any) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(node) if node is not None else {}
    return {str(key): value for key, value in found.items()}


def _values(override: Override) -> Values:
    """Return the values that a sweep of Hydra's grammar stands for."""
    said = override.value()
    try:
        if isinstance(said, IntervalSweep):
            assert said.start is not None
            assert said.end is not None
            return Values(low=said.start, high=said.end, log="log" in said.tags)
        if isinstance(said, RangeSweep) and not said.shuffle:
            assert said.start is not None
            assert said.stop is not None
            return Values(low=said.start, high=said.stop, step=said.step)
        if choices := tuple(override.sweep_iterator(Transformer.encode)):
            return Values(choices)
    except (HydraException, ValueError):  # a range whose step is 0
        pass
    remedy = "Write interval(low,high), range(start,stop,step), choice(a,b) or values with commas."
    raise ConfigError(f"{override.input_line} has no values", remedy, code="wrong_value")


def _described(name: str, said: Any) -> Values:
    """Return the values that a table of `hydra.sweeper.search_space` describes."""
    try:
        kind = said["type"]
        if kind == "categorical":
            return Values(tuple(said["choices"]))
        number = {"int": int, "float": float}[kind]
        step = said.get("step")
        low, high = number(said["low"]), number(said["high"])
        step = None if step is None else number(step)
        return Values(low=low, high=high, step=step, log=bool(said.get("log", False)))
    except (KeyError, TypeError, ValueError):
        remedy = "It takes type (int, float or categorical), low, high, step and log, or choices."
        raise _refused(f"search_space.{name}", "cannot be read", remedy) from None


def _listed(name: str, values: Values) -> list[Any]:
    """Return all values of a setting, for a grid."""
    if values.choices:
        return list(values.choices)
    is_whole = isinstance(values.low, int) and isinstance(values.high, int)
    step = values.step or (1 if is_whole else None)
    if step is None:
        remedy = "Give it choices or a step, or use another sampler."
        raise ConfigError(f"{name} has no end of values for a grid", remedy, where=COMMAND_LINE)
    return [values.low + n * step for n in range(int((values.high - values.low) // step))]


def _sampler(said: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    target = str(said.pop("_target_"))
    said.pop("_partial_", None)
    name = target.removeprefix(_OF_OPTUNA)
    if name in _REFUSED:
        raise _refused("sampler", f"({name}) {_REFUSED[name]}", f"Use {SWEEPER_GROUP}/sampler=tpe.")
    if not target.startswith(_OF_OPTUNA) or not name.isidentifier():
        raise _refused("sampler", f"({target}) is none of optuna.samplers", "Name one of these.")
    options = {key: value for key, value in said.items() if value is not None}
    for key, value in options.items():
        if not isinstance(value, bool | int | float | str):
            raise _refused(f"sampler.{key}", "is no plain value", "Leave it out.")
    return name, options


def _direction(said: Any) -> Literal["minimize", "maximize"]:
    said = OmegaConf.to_container(said) if isinstance(said, ListConfig) else said
    *others, found = said if isinstance(said, list) else [said]
    if others:
        remedy = "Name one direction: the result is sweep.objective."
        raise _refused("direction", "has several, but a run has one result here", remedy)
    if found == "minimize":
        return "minimize"
    if found == "maximize":
        return "maximize"
    raise _refused(f"direction={found!s}", "is no direction", "Use minimize or maximize.")


def _refused(name: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"{SWEEPER}.{name} {why}", remedy, [f"{SWEEPER}.{name.partition('=')[0]}"])
