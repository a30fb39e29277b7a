"""Families of models and datasets: a class of settings each, which `recipes` defines.

A family's settings are a frozen dataclass in a module of their own, `recipes/<module>_options.py`,
beside `recipes/<module>.py`, which builds what they describe. All of these classes are imported
when settings are read, so none of their modules imports JAX, Flax or Grain.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self, TypeVar

from launcher.config.errors import ConfigError
from launcher.config.fields import Switch

_PACKAGE, _SUFFIX = "recipes", "_options"


class ModelOptions:
    """The settings of a model family. A subclass is a frozen dataclass, a field a setting.

    Attributes:
        name: the family's name, a field with a default: what `model.name` says.
        switches: settings that have an effect only beside others.
        shorthands: settings that stand for others, such as a size, each with those others.
        keeps_documents: whether its attention keeps within the documents of a packed row.
    """

    name: str
    switches: ClassVar[tuple[Switch, ...]] = ()
    keeps_documents: ClassVar[bool] = False
    shorthands: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @property
    def layers(self) -> int | None:
        """The number of pipeline layers: one more than the model's marks; None: counted later."""
        return None

    def filled(self) -> Self:
        """Return the settings with all that their shorthands stand for; raises ConfigError."""
        return self

    def check(self) -> Iterator[ConfigError]:
        """Yield the contradictions between these settings."""
        yield from ()


class DatasetOptions:
    """The settings of a dataset family. A subclass is a frozen dataclass, a field a setting.

    Attributes:
        name: the family's name, a field with a default: what `dataset.name` says.
        switches: settings that have an effect only beside others.
    """

    name: str
    switches: ClassVar[tuple[Switch, ...]] = ()

    def check(self, model: ModelOptions) -> Iterator[ConfigError]:
        """Yield the contradictions between these settings and a model's."""
        yield from ()

    def notes(self, model: ModelOptions) -> Iterator[str]:
        """Yield what a user should know about settings that are allowed, a line each."""
        yield from ()


_Options = TypeVar("_Options", bound=type[ModelOptions] | type[DatasetOptions])
_MODELS: dict[str, type[ModelOptions]] = {}
_DATASETS: dict[str, type[DatasetOptions]] = {}


def register(options: _Options) -> _Options:
    """Make a family known by its name, as a decorator of its settings.

    Raises:
        TypeError: the name has no default, or is another family's.
    """
    known: dict[str, Any] = _MODELS if issubclass(options, ModelOptions) else _DATASETS
    name = getattr(options, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"{options.__name__} needs a default of its field `name`")
    other = known.setdefault(name, options).__module__
    if other != options.__module__:
        raise TypeError(f"{options.__module__} and {other} both name their family {name!r}")
    return options


def find_models() -> Mapping[str, type[ModelOptions]]:
    """Return the settings of each model family, by its name."""
    _import_options()
    return dict(sorted(_MODELS.items()))


def find_datasets() -> Mapping[str, type[DatasetOptions]]:
    """Return the settings of each dataset family, by its name."""
    _import_options()
    return dict(sorted(_DATASETS.items()))


def builder_of(options: type[ModelOptions | DatasetOptions]) -> str:
    """Return the name of the module that builds what these settings describe."""
    return options.__module__.removesuffix(_SUFFIX)


def load_recipes() -> ModuleType:
    """Import and return the package `recipes` beside this one.

    `python -m` searches the working folder first, and would find a folder `recipes` of the user's
    there.
    """
    home = Path(__file__).resolve().parents[2]
    loaded = sys.modules.get(_PACKAGE)
    spec = PathFinder.find_spec(_PACKAGE, [str(home)])
    assert spec is not None
    assert spec.loader is not None
    if loaded is None or loaded.__file__ != spec.origin:
        loaded = sys.modules[_PACKAGE] = module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return loaded


@functools.cache
def _import_options() -> None:
    """Import each module of `recipes` that defines settings, by name: nothing else knows them."""
    for module in pkgutil.iter_modules(load_recipes().__path__, f"{_PACKAGE}."):
        if module.name.endswith(_SUFFIX):
            import_module(module.name)
