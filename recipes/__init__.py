"""What is trained: one module a model family, one a dataset family, and the two doors to them.

The modules here are plain single-device JAX and NumPy code. They know nothing of parallelism except
`launcher.mark_pipeline_boundary`, which they call between the layers of a model. `launcher.train`
comes in through `build_model`, `build_dataset` and `check_dataset`. Importing this package imports
neither JAX nor Grain, so that settings can be checked before anything heavy is loaded.

To add a model, write a module with `build(options, precision) -> Model` and name it in `_MODELS`.
To add a dataset, write one with `build(options, model_options, global_batch_size, seed) -> Dataset`
and `check(options, model_options, validation)`, and name it in `_DATASETS`. Modules outside this
package are named by the settings `model.module` and `dataset.module` and have the same functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import ModuleType

    import jax
    import numpy as np

    Params = Any
    Batch = dict[str, np.ndarray]

_MODELS = {"gpt": "recipes.gpt", "mlp": "recipes.mlp"}
_DATASETS = {
    "stdlib_text": "recipes.text",
    "text": "recipes.text",
    "synthetic": "recipes.synthetic",
}


class InputError(ValueError):
    """The user's settings or files cannot be used. One line: what, which key, what to do."""


class Model(NamedTuple):
    """A model as two pure functions.

    `init(key)` gives the parameters, a pytree of float32 arrays.
    `loss(params, batch, key)` gives `(loss, metrics)`: the mean loss over the batch, a float32
    scalar, and a dict of further scalars. `key` feeds dropout; None switches dropout off.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, Batch, jax.Array | None], tuple[jax.Array, dict[str, jax.Array]]]


class Dataset(NamedTuple):
    """Batches addressed by number.

    `train(k)` gives batch k, a pure function of the seed and k, for every k >= 0; each pass over
    the data has an order of its own. `validation(k)` does the same for held-out data, in an order
    that does not depend on the seed; it is None where nothing is held out. `describe` says in one
    line what the data is.
    """

    train: Callable[[int], Batch]
    validation: Callable[[int], Batch] | None
    describe: str


def build_model(options: Any, precision: str) -> Model:
    """The model that `options.name` names.

    `options` holds the fields of the settings' `model` section. `precision` is "fp32" or "bf16":
    the type of activations and matrix products; parameters and loss are float32 either way.
    """
    return _module(_MODELS, "model", options).build(_fields(options), precision)


def build_dataset(options: Any, model_options: Any, global_batch_size: int, seed: int) -> Dataset:
    """The dataset that `options.name` names, in the shapes that the model takes.

    `options` and `model_options` hold the fields of the settings' `dataset` and `model` sections.
    `seed`, in [0, 2**32), picks the order of the training data. Raises `InputError` where the data
    cannot be used and `OSError` where a file cannot be read after all.
    """
    module = _module(_DATASETS, "dataset", options)
    return module.build(_fields(options), _fields(model_options), global_batch_size, seed)


def check_dataset(options: Any, model_options: Any, *, validation: bool) -> None:
    """Raises `InputError` where `build_dataset` would, from the files' names and sizes alone.

    `validation` says whether the run evaluates; then held-out data must exist. Imports neither
    JAX nor Grain.
    """
    module = _module(_DATASETS, "dataset", options)
    module.check(_fields(options), _fields(model_options), validation)


def find_module(section: str, name: str) -> None:
    """Raises `InputError` where the module `<section>.module`, a user's own, is not there. Unlike
    the other functions here it runs nothing of it, and so cannot say what it holds."""
    path, above = None, ""
    for part in name.split("."):
        above = f"{above}.{part}" if above else part
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find(above, path) for find in finders if find)
        spec = next((spec for spec in specs if spec), None)
        if spec is None:
            raise _not_found(section, name)
        path = spec.submodule_search_locations or []


def _module(table: Mapping[str, str], section: str, options: Any) -> ModuleType:
    if options.name == "custom":
        return _users_own(section, options.module)
    if options.name not in table:
        raise InputError(
            f"{section}.name={options.name} is not known; choose one of {', '.join(table)}"
        )
    return import_module(table[options.name])


def _users_own(section: str, name: str) -> ModuleType:
    """The module `<section>.module`; whether it may be loaded has been decided before."""
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks another
        raise _not_found(section, name) from None
    for door in ("build",) if section == "model" else ("build", "check"):
        if not callable(getattr(module, door, None)):
            raise InputError(
                f"{section}.module={name} has no function {door}; "
                f"write one as recipes/{'mlp' if section == 'model' else 'synthetic'}.py does"
            )
    return module


def _not_found(section: str, name: str) -> InputError:
    return InputError(
        f"{section}.module={name} is not found; install it, or put its folder on PYTHONPATH"
    )


def _fields(options: Any) -> Any:
    """What a module is told: the section's fields; of a user's own module its `options`."""
    if options.name != "custom":
        return options
    return SimpleNamespace(name=options.module, **options.options)
