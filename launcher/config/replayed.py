"""Settings of a run whose plan is replayed, from the `config.yaml` beside its `plan.json`.

A plan is for one program: `compose` takes the settings that make that program from its run unless
they are set here, and `driver.planning.replay` reports those that differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.base.files import DamagedError
from launcher.base.reading import read_yaml
from launcher.config.environment import resolved
from launcher.config.errors import shown
from launcher.config.machines import CLUSTERS, Emulated, Local
from launcher.config.parallel import METHODS, Replay
from launcher.config.schema import MODELS, Config
from launcher.config.sources import Source, Tree, choices

_SECTIONS = ("model", "dataset", "optimizer", "cluster")
_TAKEN = (*_SECTIONS, "train")
_OF_TRAIN = ("steps", "global_batch_size", "precision", "non_finite")
_HERE = (Local, Emulated)  # clusters that can be taken over: the others mean more than devices


def with_runs_settings(
    tree: Tree, sources: Sequence[Source], overrides: Sequence[Override]
) -> Tree:
    """Return `tree` with what makes its program from the run that it is about.

    That is the model, the data and more, as far as neither the command line nor a recipe says a
    word of it. `tree` is not yet resolved.
    """
    parallel, plan = tree.get("parallel"), None
    if tree.get("task") in ("evaluate", "generate"):
        run_of = [OmegaConf.select(OmegaConf.create(tree), f"run.{key}") for key in ("dir", "id")]
        plan = Path(*map(str, run_of)) / "plan.json" if None not in run_of else None
    elif isinstance(parallel, dict) and METHODS.get(str(parallel.get("method"))) is Replay:
        plan = OmegaConf.select(OmegaConf.create(tree), "parallel.plan")
    if plan is None:
        return tree
    run = settings_beside(str(plan))
    if not run:
        return tree
    said = {override.key_or_group for override in overrides}
    for source in sources:
        if not source.package and source.path.name != "config.yaml":  # which all others come after
            content = OmegaConf.to_container(OmegaConf.load(source.path))
            assert isinstance(content, dict)
            said |= choices(content).keys() | set(_leaves(content))
    for shorthand, names in _shorthands(tree.get("model")).items():
        if f"model.{shorthand}" in said:
            said |= {f"model.{name}" for name in names}
    taken = {
        name: tree.get(name)
        if _names_kind(name, said)
        else _laid_over(run[name], tree.get(name), said, name)
        for name in _SECTIONS
    }
    if CLUSTERS.get(str(run["cluster"].get("kind"))) not in _HERE:
        del taken["cluster"]
    if isinstance(tree.get("train"), dict):
        keys = [key for key in _OF_TRAIN if key in run["train"] and f"train.{key}" not in said]
        taken["train"] = {**tree["train"], **{key: run["train"][key] for key in keys}}
    return {**tree, **taken}


def _names_kind(section: str, said: Set[str]) -> bool:
    """Return whether the kind of a section is said: then the rest of it is, too."""
    (field,) = (field for field in dataclasses.fields(Config) if field.name == section)
    variants = field.metadata.get("variants")
    return variants is not None and f"{section}.{variants.key}" in said


def _shorthands(model: Any) -> Mapping[str, Sequence[str]]:
    """Return the settings of a model that stand for others, each with those others."""
    kind = MODELS.get(str(model.get("name"))) if isinstance(model, Mapping) else None
    return kind.shorthands if kind else {}


def _leaves(tree: Mapping[Any, Any], above: str = "") -> Iterator[str]:
    """Yield the dotted keys of a tree's values."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def _laid_over(theirs: Any, ours: Any, said: Set[str], key: str) -> Any:
    """Return what the run says of `key`, and over it what is said of it here."""
    if key in said:
        return ours
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return theirs
    laid = {}
    for name in dict.fromkeys((*theirs, *ours)):
        below = f"{key}.{name}"
        if name in theirs and below not in said:
            laid[name] = _laid_over(theirs[name], ours.get(name), said, below)
        elif name in ours and any(word == below or word.startswith(f"{below}.") for word in said):
            laid[name] = ours[name]
    return laid


def settings_beside(plan: str) -> Tree:
    """Return the settings of the run that a plan is of.

    None if there is no such file, or it cannot be read: then the program alone tells whether the
    plan is for it.
    """
    try:
        tree = read_yaml(Path(plan).parent / "config.yaml")
    except (OSError, DamagedError, yaml.YAMLError):
        return {}
    ours = (*_TAKEN, "run", "parallel")  # and no other program's config.yaml
    is_run = isinstance(tree, dict) and all(isinstance(tree.get(name), dict) for name in ours)
    return tree if is_run else {}


def resolved_beside(plan: str) -> Tree:
    """Return `settings_beside` with the values of the variables that it asks for.

    None if they are not set here: then, too, the program alone tells.
    """
    tree = settings_beside(plan)
    try:
        return resolved(OmegaConf.create(tree))[0] if "${" in str(tree) else tree
    except OmegaConfBaseException:
        return {}


def in_common(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a replay has in common with the run of its plan.

    That is, of what `here` may have from `there`: "model (but for dropout)", "train.steps=4".
    """
    for name in _SECTIONS:
        ours, theirs = here[name], there[name]
        if any(ours.get(key) != theirs.get(key) for key in ("name", "kind")):
            continue
        keys = _compared(name, ours)
        differing = [key for key in keys if ours[key] != theirs.get(key, ours[key])]
        yield name + (f" (but for {', '.join(differing)})" if differing else "")
    for key in _OF_TRAIN:
        if there["train"].get(key) == here["train"][key]:
            yield f"train.{key}={_plain(here['train'][key])}"


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    """Yield what makes `here` another program than `there`, both the settings of a run.

    Each says what is there and what is here, such as "model.num_layers=4 and not 2".
    """
    for name in ("model", "optimizer"):
        ours, theirs = here[name], there[name]
        if theirs.get("name") not in (None, ours["name"]):
            yield f"{name}={theirs['name']} and not {ours['name']}"
            continue
        yield from _differing(name, _compared(name, ours), ours, theirs)
    ours, theirs = here["train"], there["train"]
    yield from _differing("train", ("global_batch_size", "precision"), ours, theirs)
    if _decays_over(here) != _decays_over({**here, "train": {**ours, **theirs}}):
        yield from _differing("train", ("steps",), ours, theirs)
    if "skip" in (ours["non_finite"], theirs.get("non_finite")):
        yield from _differing("train", ("non_finite",), ours, theirs)


def _compared(section: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings of a section but for shorthands: what they stand for says as much."""
    shorthands = _shorthands(settings) if section == "model" else {}
    return [key for key in settings if key not in shorthands]


def _differing(
    section: str, keys: Iterable[str], here: Mapping[str, Any], there: Mapping[str, Any]
) -> Iterator[str]:
    for key in keys:
        if key in there and there[key] != here[key]:
            yield f"{section}.{key}={_plain(there[key])} and not {_plain(here[key])}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _decays_over(settings: Mapping[str, Any]) -> int:
    """Return the number of steps that the learning rate's decay is computed from."""
    optimizer, steps = settings["optimizer"], settings["train"]["steps"]
    is_constant = optimizer.get("decay") == "constant"  # one of the user's own has no such setting
    return 0 if is_constant else max(1, steps - optimizer.get("warmup_steps", 0))
