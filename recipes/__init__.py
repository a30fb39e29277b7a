"""Models and datasets: plain single-device JAX and NumPy code that knows nothing of parallelism.

A family is a folder, `models/<family>/` or `datasets/<family>/`. `options.py` defines its settings,
a frozen dataclass; it is imported to check them, so it imports neither JAX nor Grain. `model.py` or
`dataset.py` builds what they describe: a model's has `build(options, precision) -> Model`, a
dataset's has `check(options, model_options, validation)` and `build(options, model_options,
global_batch_size, seed) -> Dataset`, `fingerprint(options) -> str` where its content may change,
and `tokenizer(options) -> Tokenizer` where it is text; `bytes_per_target(options, model_options,
rows) -> float | None` where the text has a length; `is_prepared(options) -> bool` and
`prepare(options, processes, progress) -> str` where something is made of the data once. A module of
the user's own is named by the setting `model.module` or `dataset.module` and has the same
functions.

Importing this package imports neither JAX nor Grain.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.config.families import builder_of, find_datasets, find_models

if TYPE_CHECKING:
    from types import ModuleType

    import jax
    import numpy as np

    from launcher.recipes.data.corpus.tokenizers import Tokenizer

    Batch = dict[str, np.ndarray]


class InputError(ValueError):
    """Settings or files that cannot be used. Its one line says what, which key and what to do."""


class Model(NamedTuple):
    """A model as two pure functions.

    Attributes:
        init: takes a random key and returns the parameters, a pytree of float32 arrays; with state,
            `(parameters, state)`.
        loss: takes the parameters, with state also the state, a batch and a random key for dropout,
            None to switch that off (evaluation); returns the mean loss over the batch, a float32
            scalar, and a dict of further scalars, `(loss, metrics)`; with state,
            `(loss, (metrics, state))`. A loss that is a mean over something else than rows, such as
            the tokens that a mask leaves, gives their number as the metric `weight`.
        has_state: whether the model has state, a pytree of arrays that training changes without
            gradients: the running averages of batch normalization, counters. The state that `loss`
            returns has the structure, shapes and dtypes of the one it was given, and is the next
            step's; an evaluation does not change it.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[..., tuple[jax.Array, Any]]
    has_state: bool = False


@dataclass(frozen=True)
class Batches:
    """Numbered batches of rows that can be made apart; called with k, it returns batch k.

    Each process makes the rows of a batch that its devices need, and no others.

    Attributes:
        numbers: returns the sample numbers of batch k, int64 [rows], a pure function of k.
        gather: makes the rows of these sample numbers, one or more of them in any order.
        num_rows: the rows of all batches together, of which the last may hold fewer than the
            others, and those after it none; None where there is no end to them.
        a_sample: a sample number, whose row shows the shapes of all; None: the first of batch 0.
    """

    numbers: Callable[[int], np.ndarray]
    gather: Callable[[np.ndarray], Batch]
    num_rows: int | None = None
    a_sample: int | None = None

    def __call__(self, k: int) -> Batch:
        """Return batch k."""
        return self.gather(self.numbers(k))


class Dataset(NamedTuple):
    """Batches addressed by number, as functions or as `Batches`.

    A function makes whole batches, in every process. `launcher.recipes.data.batches` has functions
    that return `Batches`.

    Attributes:
        train: returns batch k, a pure function of the seed and k, for every k >= 0; each pass over
            the data has an order of its own.
        validation: does the same for held-out data, in an order that does not depend on the seed;
            None where nothing is held out. A batch with fewer rows than `global_batch_size`, or
            with none, is the last one.
        describe: one line that says what the data is.
    """

    train: Callable[[int], Batch]
    validation: Callable[[int], Batch] | None
    describe: str


def build_model(options: Any, precision: str, device_kind: str = "cpu") -> Model:
    """Return the model that `options.name` names.

    Args:
        options: the settings of the section `model`.
        precision: the type of activations and matrix products, "fp32" or "bf16"; parameters and
            loss are float32 either way.
        device_kind: the devices that it is for, as JAX names them.

    Raises:
        InputError: there is no such model, or no such module of the user's, or it asks for what the
            devices do not have.
    """
    from launcher.recipes.models.attention import with_attention  # which imports this module

    chosen = with_attention(options, precision, device_kind)
    model: Model = _module("model", options).build(_fields(chosen), precision)
    return model


def build_dataset(options: Any, model_options: Any, global_batch_size: int, seed: int) -> Dataset:
    """Return the dataset that `options.name` names, in the shapes that the model takes.

    Args:
        options: the settings of the section `dataset`.
        model_options: the settings of the section `model`.
        global_batch_size: the samples of a batch.
        seed: in [0, 2**32); picks the order of the training data.

    Raises:
        InputError: the data cannot be used.
        OSError: a file cannot be read after all.
    """
    module = _module("dataset", options)
    dataset: Dataset = module.build(
        _fields(options), _fields(model_options), global_batch_size, seed
    )
    return dataset


def check_dataset(options: Any, model_options: Any, *, validation: bool) -> None:
    """Refuse what `build_dataset` would, from the names and sizes of files alone.

    Imports neither JAX nor Grain.

    Args:
        options: the settings of the section `dataset`.
        model_options: the settings of the section `model`.
        validation: whether the run evaluates; then held-out data must exist.

    Raises:
        InputError: the data cannot be used.
    """
    module = _module("dataset", options)
    module.check(_fields(options), _fields(model_options), validation)


def fingerprint_dataset(options: Any) -> str:
    """Return a digest of the data's content; "" for data without one.

    Imports neither JAX nor Grain, and no module of the user's.

    Args:
        options: the settings of the section `dataset`.

    Raises:
        InputError: the data cannot be used.
        OSError: a file cannot be read.
    """
    if options.name == "custom":
        return ""
    fingerprint = getattr(_module("dataset", options), "fingerprint", None)
    return fingerprint(options) if fingerprint else ""


def needs_preparing(options: Any) -> bool:
    """Return whether `prepare_dataset` has something to do before a training.

    Args:
        options: the settings of the section `dataset`.

    Raises:
        InputError: the data cannot be used.
        OSError: a file cannot be read.
    """
    found = getattr(_module("dataset", options), "is_prepared", None)
    return found is not None and not found(_fields(options))


def prepare_dataset(options: Any, processes: int, progress: Callable[[float], None]) -> str | None:
    """Prepare the data for training, for example tokenize it; finished parts are kept.

    Args:
        options: the settings of the section `dataset`.
        processes: how many processes may work.
        progress: takes the share done, 0 to 1.

    Returns:
        What there is now, in a line or two; None: nothing is ever made of this data.

    Raises:
        InputError: the data cannot be used.
        OSError: a file cannot be read or written.
    """
    found = getattr(_module("dataset", options), "prepare", None)
    if found is None:
        return None
    made: str = found(_fields(options), processes, progress)
    return made


def tokenizer_of(options: Any) -> Tokenizer:
    """Return what turns text into the tokens of a dataset, and back.

    Its module has `tokenizer(options)`, one of the user's own, too, where that is so.

    Args:
        options: the settings of the section `dataset`.

    Raises:
        InputError: its data is no text, or does not say by which tokenizer it was made.
    """
    found = getattr(_module("dataset", options), "tokenizer", None)
    if found is None:
        raise InputError(
            f"dataset.name={options.name} is not text to continue; name a run that was trained "
            "from text or tokens"
        )
    made: Tokenizer = found(_fields(options))
    return made


def bytes_per_target(options: Any, model_options: Any, rows: int) -> float | None:
    """Return the mean bytes of text that a target of the first held-out rows stands for.

    None where that is not known, or some of the text is not predicted.

    Args:
        options: the settings of the section `dataset`.
        model_options: the settings of the section `model`.
        rows: how many rows.

    Raises:
        InputError: the data cannot be used.
    """
    found = getattr(_module("dataset", options), "bytes_per_target", None)
    return found(_fields(options), _fields(model_options), rows) if found else None


def find_module(key: str, name: str) -> None:
    """Check that a user's own module is there; runs nothing of it.

    Args:
        key: the setting that names it, such as "model.module".
        name: the module's name.

    Raises:
        InputError: it is not there.
    """
    path, above = None, ""
    for part in name.split("."):
        above = f"{above}.{part}" if above else part
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find(above, path) for find in finders if find)
        spec = next((spec for spec in specs if spec), None)
        if spec is None:
            raise _not_found(key, name)
        path = spec.submodule_search_locations or []


def _module(section: str, options: Any) -> ModuleType:
    """Return the module that builds what `options` describe."""
    if options.name == "custom":
        functions = ("build",) if section == "model" else ("build", "check")
        return users_module(f"{section}.module", options.module, functions)
    known = find_models() if section == "model" else find_datasets()
    if options.name not in known:
        raise InputError(
            f"{section}.name={options.name} is not known; choose one of {', '.join(known)}"
        )
    return import_module(builder_of(known[options.name]))


def users_function(section: str, options: Any, name: str) -> Callable[..., Any] | None:
    """Return a further function of a user's own model or dataset, which has its options already.

    None if its module has no such function, or it is none of the user's.

    Args:
        section: "model" or "dataset".
        options: the settings of that section.
        name: the function's.

    Raises:
        InputError: there is no such module.
    """
    if options.name != "custom":
        return None
    found = getattr(_module(section, options), name, None)
    return functools.partial(found, _fields(options)) if callable(found) else None


def users_module(key: str, name: str, functions: Sequence[str]) -> ModuleType:
    """Return a user's own module, which the setting `key` names, and which has these functions.

    Whether it may be loaded has been decided before.

    Raises:
        InputError: it is not there, cannot be imported, or lacks a function.
    """
    try:
        module = import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise _not_found(key, name) from None
        raise InputError(f"{key}={name} cannot be imported: {_told(error)}") from error
    for function in functions:
        if not callable(getattr(module, function, None)):
            example = {
                "model": "models/mlp/model.py",
                "dataset": "datasets/synthetic/dataset.py",
            }.get(key.split(".")[0])
            remedy = f"write one as recipes/{example} does" if example else "write one"
            raise InputError(f"{key}={name} has no function {function}; {remedy}")
    return module


def _told(error: Exception) -> str:
    """Return an exception of a user's module with the line of code that raised it."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    # A SyntaxError names its own line; nothing of that module has run.
    return text if isinstance(error, SyntaxError) else f"{text} ({frame.filename}:{frame.lineno})"


def _not_found(key: str, name: str) -> InputError:
    return InputError(f"{key}={name} is not found; install it, or put its folder on PYTHONPATH")


def _fields(options: Any) -> Any:
    """Return the options for a module: the section's settings; for a user's own its `options`."""
    if options.name != "custom":
        return options
    return SimpleNamespace(name=options.module, **options.options)
