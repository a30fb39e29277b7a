"""Models as Hugging Face `transformers` keeps them: names and shapes of arrays, `config.json`.

A family that has them has, in its folder, a module `hf` with

- `MODEL_TYPES`: the `model_type`s of `config.json` that it reads;
- `options_of(config)`: the settings of the section `model` that a `config.json` stands for;
- `config_of(options)`: the `config.json` of settings;
- `tensors(options)`: a `Tensor` for each array there; the first is of the base model, so its name
  begins with `base_model_prefix`;
- `TIED`: names of arrays that are others' where the settings tie them (`_tied_weights_keys`);
- `UNREAD`: a pattern of the names that `transformers`, too, leaves aside: buffers of older
  versions, heads for other tasks;
- `AUTO_CLASS`: the class of `transformers` that loads such a model with its head.

It may have

- `CHOICES`: settings that `options_of` returns and a run may choose otherwise for the same weights;
- `RENAMED`: parts of the names in older files, and what they are today.

None of these modules imports JAX: settings are filled from `config.json`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import launcher.recipes.models
from launcher.base import DamagedError, hub, missing_path, read_json
from launcher.config.errors import ConfigError
from launcher.config.families import modules_of_families
from launcher.recipes.data.files import local_path

CONFIG = "config.json"
PREFIX = "hf:"  # of a path that is a folder of this kind
# Names of settings of the section `model` in most families' `config.json`.
NAMES = {
    "vocab_size": "vocab_size",
    "sequence_length": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "hidden_size": "hidden_size",
}

_MULTIPLE, _MOST_ADDED = 128, 0.05  # of a padded vocabulary, and the share of it that is padding


def padded(vocabulary: int) -> int:
    """Return how many rows the arrays of a vocabulary have: its own, or a multiple of 128.

    Devices divide the multiple, as in Megatron-LM (Shoeybi et al., 2019, section 3.1). It does not
    depend on how many there are, so that every plan trains the same arrays; where it would add more
    than a twentieth, the vocabulary stays as it is. Padding begins at 0 and gets no gradient.
    """
    multiple = -(-vocabulary // _MULTIPLE) * _MULTIPLE
    return multiple if multiple <= vocabulary * (1 + _MOST_ADDED) else vocabulary


@dataclass(frozen=True)
class Tensor:
    """An array there and here.

    Attributes:
        theirs: its name there.
        ours: its name in the model's parameters, such as `layers_0.mlp.linear_up.kernel`.
        split: its shape there with the axes that it has here apart, such as heads.
        order: of each axis here, which one of `split` it is.
        offset: what is to be added here: norms that are stored as their difference from 1.
        joined: the axes of `split` that are one axis there, as the number of axes that each of its
            axes is made of; empty: each is one.
        of_vocabulary: whether its first axis there is the vocabulary, which is padded here.
        part: of an array here that is several there, such as the kernels of all experts: the axis
            that they are stacked along, which one this is, and how many there are. `split` and
            `order` are those of one.
    """

    theirs: str
    ours: str
    split: tuple[int, ...]
    order: tuple[int, ...] = ()
    offset: float = 0.0
    joined: tuple[int, ...] = ()
    of_vocabulary: bool = False
    part: tuple[int, int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape there."""
        sizes, counts = iter(self.split), self.joined or (1,) * len(self.split)
        return tuple(math.prod(itertools.islice(sizes, count)) for count in counts)

    @property
    def shape_here(self) -> tuple[int, ...]:
        """The shape of the array here, or of that which it is a part of."""
        split = (self.split[0] + self._padding, *self.split[1:])
        own = [split[axis] for axis in self._order]
        if self.part is not None:
            axis, _, count = self.part
            own.insert(axis, count)
        return tuple(own)

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        """Return the array, or the part, as it is here, of what it is there."""
        array = array.reshape(self.split)
        if self._padding:
            array = np.pad(array, [(0, self._padding), *[(0, 0)] * (array.ndim - 1)])
        array = array.transpose(self._order)
        # In 32 bits: a narrow type would round the sum.
        return array.astype(np.float32) + np.float32(self.offset) if self.offset else array

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Return the array as it is there, of the whole one that is here."""
        if self.part is not None:
            array = array.take(self.part[1], self.part[0])
        array = array - np.asarray(self.offset, array.dtype) if self.offset else array
        array = array.transpose(np.argsort(self._order))[: self.split[0]]
        return np.ascontiguousarray(array.reshape(self.shape))

    @property
    def _order(self) -> tuple[int, ...]:
        return self.order or tuple(range(len(self.split)))

    @property
    def _padding(self) -> int:
        return padded(self.split[0]) - self.split[0] if self.of_vocabulary else 0


def folder_of(named: str, fits: hub.Fits = hub.is_small) -> Path | None:
    """Return the folder that `hf:<folder>` or `hf://org/name` names; None of other words.

    Args:
        named: the words.
        fits: which files of a repository to download.

    Raises:
        InputError: they cannot be had.
    """
    if hub.is_name(named):
        return Path(local_path("the model", named, fits))
    return Path(named.removeprefix(PREFIX)).expanduser() if named.startswith(PREFIX) else None


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return what `config.json` in a folder holds.

    Raises:
        OSError: it cannot be read.
        DamagedError: it is none.
    """
    try:
        found = read_json(folder / CONFIG)
    except DamagedError as error:
        raise DamagedError(f"{CONFIG}: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise DamagedError(f"{CONFIG} names no model_type")
    return found


def family_of(config: Mapping[str, Any]) -> ModuleType:
    """Return the module that reads models of this `config.json`.

    Raises:
        DamagedError: there is none.
    """
    known = {kind: module for module in _modules() for kind in module.MODEL_TYPES}
    kind = config["model_type"]
    if kind not in known:
        raise DamagedError(f"model_type is {kind!r}; these are known: {', '.join(sorted(known))}")
    return known[kind]


def family_name(module: ModuleType) -> str:
    """Return the name of the family whose folder holds a module."""
    return module.__name__.split(".")[-2]


def family_named(name: str) -> ModuleType | None:
    """Return the module of a family by the name that `model.name` says; None if it has none."""
    return next((m for m in _modules() if family_name(m) == name), None)


def dimensions_in(named: str, name: str) -> dict[str, Any]:
    """Return the settings of the model in a folder, for `model.size=hf:<folder>`.

    Args:
        named: the words, `hf:<folder>`.
        name: the family, `model.name`.

    Raises:
        ConfigError: there is no such model, or it is of another family.
    """
    folder = folder_of(named)
    assert folder is not None
    try:
        config = read_config(folder)
        family = family_of(config)
        if family is not family_named(name):
            other = family_name(family)
            raise DamagedError(f"it is a model={other}, not a model={name}")
        return options_in(family, config)
    except OSError as error:
        problem = f"{folder / CONFIG}: {error.strerror}"
        if not folder.exists():
            problem = f"{folder} {missing_path(folder)}"
    except DamagedError as error:
        problem = str(error)
    raise ConfigError(
        f"model.size={named} cannot be used: {problem}",
        f"Name a folder with a {CONFIG} and *.safetensors, as transformers writes it, or hf://org/"
        "name.",
        ["model.size"],
    )


def options_in(family: ModuleType, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a `config.json` stands for, by its family's module.

    Raises:
        DamagedError: it lacks something, or holds what the family cannot express.
    """
    try:
        return dict(family.options_of(config))
    except KeyError as error:
        raise DamagedError(f"{CONFIG} lacks {error}") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"{CONFIG} holds a value that is not a dimension ({error})") from None


def model_in(folder: Path) -> tuple[ModuleType, list[Tensor]]:
    """Return the family of the model in a folder, and its arrays.

    Raises:
        OSError: `config.json` cannot be read.
        DamagedError: it is none, or of a model that no family can express.
    """
    config = read_config(folder)
    family = family_of(config)
    return family, list(family.tensors(SimpleNamespace(**options_in(family, config))))


def expect(config: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuse a `config.json` that says something else than these values, which are all there is.

    Raises:
        DamagedError: it does.
    """
    for name, value in values.items():
        if config.get(name, value) != value:
            raise DamagedError(f"{name}={config[name]} is not supported; {name}={value} is")


def ratio_of(config: Mapping[str, Any], name: str, width: int, hidden: str) -> int:
    """Return an MLP's width over the hidden size; raises DamagedError if that is not whole."""
    if width % config[hidden]:
        raise DamagedError(f"{name}={width} is not a multiple of {hidden}={config[hidden]}")
    return int(width // config[hidden])


def places_of(
    family: ModuleType, known: Sequence[str], stored: Iterable[str]
) -> dict[str, list[str]]:
    """Return under which names the arrays of a model are stored, by their names in it.

    As in `transformers`, a stored name may lack `base_model_prefix`, or have it once more than the
    model's. An array that the model has not is returned by its own name, unless it is left aside.

    Args:
        family: the module of the model's family.
        known: the model's names, those of its `tensors`.
        stored: the names in the files.
    """
    names, prefix = set(known), known[0].partition(".")[0] + "."
    found: dict[str, list[str]] = {}
    for name in stored:
        today = name
        for old, new in getattr(family, "RENAMED", {}).items():
            today = today.replace(old, new)
        forms = (today, prefix + today, today.removeprefix(prefix))
        tied = (family.TIED[one] for one in forms if one in family.TIED)
        ours = next((one for one in (*forms, *tied) if one in names), None)
        if ours or not family.UNREAD.search(today):
            found.setdefault(ours or name, []).append(name)
    return found


def in_layers(count: int, place: str, block: Callable[[int], Iterable[Tensor]]) -> Iterator[Tensor]:
    """Yield the arrays of all blocks.

    Args:
        count: the number of blocks.
        place: the name of their list there.
        block: returns the arrays of a block, by its number and their names in it.
    """
    for i in range(count):
        for one in block(i):
            theirs, ours = f"{place}.{i}.{one.theirs}", f"layers_{i}.{one.ours}"
            yield replace(one, theirs=theirs, ours=ours)


def layer_norm(theirs: str, ours: str, size: int) -> Iterator[Tensor]:
    """Yield the arrays of a layer norm."""
    yield Tensor(f"{theirs}.weight", f"{ours}.scale", (size,))
    yield Tensor(f"{theirs}.bias", f"{ours}.bias", (size,))


def _modules() -> Iterator[ModuleType]:
    for name in modules_of_families(launcher.recipes.models, "hf"):
        yield import_module(name)
