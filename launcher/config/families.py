"""Registry of model and dataset families, each a class of settings defined in `recipes`.

A family is a folder, `recipes/models/<family>/` or `recipes/datasets/<family>/`: its settings are
a frozen dataclass in its `__init__.py`, beside `model.py` or `dataset.py`, which builds what they
describe. All of these classes are imported when settings are read, so no `__init__.py` imports JAX,
Flax or Grain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self, TypeVar

from launcher.config.errors import ConfigError
from launcher.config.fields import Switch

_PACKAGES = ("launcher.recipes.models", "launcher.recipes.datasets")


# Settings of a model that say what it takes.
_TAKING = {
    "text": ("vocab_size", "sequence_length"),
    "vectors": ("input_size", "output_size"),
    "pictures": ("image_size", "channels"),
}
_MODELS_FOR = {
    "text": "model=gpt",
    "vectors": "model=mlp",
    "pictures": "model=vit, resnet, wide_resnet or unet",
}


def taken_by(model: Any) -> str:
    """Return what a model takes by its settings: a key of `_TAKING`; "" where they do not say."""
    kinds = (kind for kind, names in _TAKING.items() if all(hasattr(model, n) for n in names))
    return next(kinds, "")


class ModelOptions:
    """Settings of a model family. A subclass is a frozen dataclass with a field for each setting.

    Attributes:
        name: the family's name, the value of `model.name`, a field with a default.
        switches: settings that need another setting.
        shorthands: settings that stand for others, such as a size, with those others.
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

    @property
    def vocabulary_rows(self) -> int:
        """How many rows the arrays of its vocabulary have; 0: that is not known."""
        return 0

    def filled(self) -> Self:
        """Return the settings with their shorthands expanded; raise ConfigError."""
        return self

    def check(self) -> Iterator[ConfigError]:
        """Yield the contradictions between these settings."""
        yield from ()

    def notes(self, devices: int) -> Iterator[str]:
        """Yield what a plan should say of these dimensions, cut over so many devices."""
        yield from ()


class DatasetOptions:
    """Settings of a dataset family. A subclass is a frozen dataclass with a field for each setting.

    Attributes:
        name: the family's name, the value of `dataset.name`, a field with a default.
        switches: settings that need another setting.
        holds: what models may take of it, as `taken_by` names it; empty: anything.
    """

    name: str
    switches: ClassVar[tuple[Switch, ...]] = ()
    holds: ClassVar[tuple[str, ...]] = ()

    @property
    def patience(self) -> float:
        """How many seconds a batch may be waited for, where its place may be busy for a while."""
        return 0.0

    def pinned(self, before: Callable[[], Mapping[str, Any]]) -> Self:
        """Return the settings with what they name elsewhere, so that all see the same.

        Args:
            before: returns these settings of the run that is resumed; empty without one.

        Raises:
            launcher.recipes.InputError: it is not there, or is another now.
        """
        return self

    def check(self, model: ModelOptions) -> Iterator[ConfigError]:
        """Yield the contradictions between these settings and a model's."""
        taken = taken_by(model)
        if taken and self.holds and taken not in self.holds:
            yield ConfigError(
                f"model={model.name} cannot learn from dataset={self.name}: "
                f"it takes {taken}, not {self.holds[0]}",
                f"Use dataset=synthetic or {' or '.join(_MODELS_FOR[k] for k in self.holds)}.",
                ["model.name", "dataset.name"],
            )

    def notes(self, model: ModelOptions) -> Iterator[str]:
        """Yield hints about allowed settings, one line each."""
        yield from ()


# A dataset whose `validation_path` names what is held out takes no part of the rest for it.
HOLDS_OUT = Switch(
    ("dataset.validation_fraction",),
    ("dataset.validation_path",),
    lambda config: config.dataset.validation_path is None,
    "dataset.validation_path names what is held out",
    "leave that out",
)

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
    """Return the name of the module that builds the model or dataset of these settings."""
    name = "model" if issubclass(options, ModelOptions) else "dataset"
    return f"{options.__module__}.{name}"


def modules_of_families(package: ModuleType, name: str) -> list[str]:
    """Return the full names of the modules `name` in the folders of families, sorted."""
    files = (file for home in package.__path__ for file in Path(home).glob(f"*/{name}.py"))
    names = (f"{package.__name__}.{file.parent.name}.{name}" for file in files)
    return sorted(name.removesuffix(".__init__") for name in names)


@functools.cache
def _import_options() -> None:
    """Import each family's module of settings, by its place: nothing else knows them."""
    for package in _PACKAGES:
        for name in modules_of_families(import_module(package), "__init__"):
            import_module(name)
