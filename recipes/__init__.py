"""Models and datasets: plain single-device JAX and NumPy code that knows nothing of parallelism.

A family is a folder, `models/<family>/` or `datasets/<family>/`. Its `__init__.py` defines its
settings, a frozen dataclass; it is imported to check them, so it imports neither JAX nor Grain.
`model.py` or `dataset.py` builds what they describe. A model's has `build(options, precision) ->
Model`, and `build_decoder(options, precision) -> Decoder` where it continues texts. A dataset's has
`check(options, model_options, validation)` and `build(options, model_options, global_batch_size,
seed) -> Dataset`, `fingerprint(options) -> str` where its content may change, and
`tokenizer(options) -> Tokenizer` where it is text; `bytes_per_target(options, model_options,
examples) -> float | None` where the text has a length; `is_prepared(options) -> bool` and
`prepare(options, processes, progress) -> str` where something is made of the data once. A custom
module is named by the setting `model.module` or `dataset.module` and has the same functions.

Importing this package imports neither JAX nor Grain.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from launcher.base import not_run, source_of, told
from launcher.config.families import builder_of, find_datasets, find_models
from launcher.recipes.models.attention import with_attention
from launcher.recipes.protocols import Batch, Batches, Dataset, InputError, Model, Tokenizer

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Batch", "Batches", "Dataset", "InputError", "Model", "Tokenizer"]


def build_model(options: Any, precision: str, compute_capability: float | None = None) -> Model:
    """Return the model that `options.name` names.

    Args:
        options: the settings of the section `model`.
        precision: the type of activations and matrix products, "fp32" or "bf16"; parameters and
            loss are float32 either way, and so are products on GPUs that have no others.
        compute_capability: of the GPUs that it is for, such as 9.0; None: of CPUs, or unknown.

    Raises:
        InputError: there is no such model, or no such module of the user's, or it asks for what the
            devices do not have.
    """
    from launcher.hardware import has_bf16

    chosen = with_attention(options, precision, compute_capability)
    model: Model = _function("model", options, "build")(_fields(chosen), precision)
    if has_bf16(compute_capability):
        return model
    from launcher.trace import products_in_fp32

    return Model(model.init, products_in_fp32(model.loss), model.has_state)


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
    build = _function("dataset", options, "build")
    dataset: Dataset = build(_fields(options), _fields(model_options), global_batch_size, seed)
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
    check = _function("dataset", options, "check")
    check(_fields(options), _fields(model_options), validation)


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
    fingerprint = further_function("dataset", options, "fingerprint")
    return fingerprint() if fingerprint else ""


def rows_taken(
    options: Any, before: Mapping[str, Any], data: str, rows: int, taken: Mapping[str, int]
) -> dict[str, int]:
    """Return how many rows of each source were taken, for `Dataset.after`; {} for one source.

    Args:
        options: the settings of the section `dataset` now.
        before: that section as it was.
        data: the fingerprint of the data as they were.
        rows: the rows that were taken by those settings, of all sources.
        taken: by source, the rows that were taken before them.

    Raises:
        InputError: the data cannot be used.
        OSError: a file cannot be read.
    """
    if before["name"] != options.name or options.name == "custom":
        return {}
    own = further_function("dataset", options, "rows_taken")
    return own(before, data, rows, taken) if own else {}


def needs_preparing(options: Any) -> bool:
    """Return whether `prepare_dataset` has something to do before a training.

    Args:
        options: the settings of the section `dataset`.

    Raises:
        InputError: the data cannot be used.
        OSError: a file cannot be read.
    """
    is_prepared = further_function("dataset", options, "is_prepared")
    return is_prepared is not None and not is_prepared()


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
    prepare = further_function("dataset", options, "prepare")
    return prepare(processes, progress) if prepare else None


def tokenizer_of(options: Any) -> Tokenizer:
    """Return what turns text into the tokens of a dataset, and back.

    Args:
        options: the settings of the section `dataset`.

    Raises:
        InputError: its data is no text, or does not say by which tokenizer it was made.
    """
    tokenizer = further_function("dataset", options, "tokenizer")
    if tokenizer is None:
        raise InputError(
            f"dataset.name={options.name} is not text to continue; name a run that was trained "
            "from text or tokens"
        )
    made: Tokenizer = tokenizer()
    return made


def bytes_per_target(options: Any, model_options: Any, examples: int) -> float | None:
    """Return the mean bytes of text that a target of the first held-out examples stands for.

    None where that is not known, or some of the text is not predicted.

    Args:
        options: the settings of the section `dataset`.
        model_options: the settings of the section `model`.
        examples: how many examples.

    Raises:
        InputError: the data cannot be used.
    """
    function = further_function("dataset", options, "bytes_per_target")
    return function(_fields(model_options), examples) if function else None


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


def further_function(section: str, options: Any, name: str) -> Callable[..., Any] | None:
    """Return an optional function of the model's or dataset's module, bound to its options.

    None if the module has no such function.

    Args:
        section: "model" or "dataset".
        options: the settings of that section.
        name: the function's.

    Raises:
        InputError: there is no such module.
    """
    function = _function(section, options, name)
    return functools.partial(function, _fields(options)) if callable(function) else None


def _function(section: str, options: Any, name: str) -> Any:
    function = getattr(_module(section, options), name, None)
    if options.name != "custom" or not callable(function):
        return function
    return users_code(f"{section}.module={options.module}", function, RETURNS[section][name])


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
        raise InputError(f"{key}={name} cannot be imported: {told(error, name)}") from error
    for function in functions:
        if not callable(getattr(module, function, None)):
            kind = key.split(".")[0]
            family = {"model": "mlp", "dataset": "synthetic"}.get(kind)
            remedy = f" as recipes/{kind}s/{family}/{kind}.py does" if family else ""
            raise InputError(f"{key}={name} has no function {function}; write one{remedy}")
    return module


# By the functions of a user's module: the classes of their results.
RETURNS = {
    "model": {"build": "Model", "build_decoder": "Decoder"},
    "dataset": {"build": "Dataset", "tokenizer": "Tokenizer", "check": "NoneType"}
    | {"is_prepared": "bool", "prepare": "str", "bytes_per_target": "float or int or NoneType"},
}
_GIVES = {"after": "Callable"}
_GIVEN = {
    "loss": "; it is given (params, batch, key) or, of a Model(init, loss, has_state=True), "
    "(params, state, batch, key)"
}


def users_code(key: str, fun: Any, returns: str = "", note: str = "") -> Any:
    """Return a user's function whose failures are one line; so are those of functions it returns.

    Args:
        key: the setting that names it, with its value.
        fun: the function; `Batches` are two.
        returns: the classes of which its result may be, such as "str or NoneType"; "": of any.
        note: what to say where it fails.

    Raises:
        InputError: it cannot be called.
    """
    if isinstance(fun, Batches):
        return _with_users_code(key, fun)
    if not callable(fun):
        raise InputError(f"{key}: {fun!r} is given for a function")

    @functools.wraps(fun, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            made = fun(*args, **kwargs)
        except Exception as error:
            if isinstance(error, OSError) or type(error).__module__.startswith("launcher."):
                raise  # it says more by itself
            where = getattr(fun, "__module__", None) or type(fun).__module__
            said = f"{source_of(fun)} fails: {told(error, where)}"
            raise InputError(f"{key}: {said}{note}") from error
        wrong, kinds = not_run(made), {kind.__name__ for kind in type(made).__mro__}
        kinds |= {"Callable"} if callable(made) else set()
        if not wrong and returns and not kinds.intersection(returns.split(" or ")):
            wrong = f"a {type(made).__name__}, not {returns}"
        if wrong:
            raise InputError(f"{key}: {source_of(fun)} returns {wrong}")
        return _with_users_code(key, made)

    return called


def _with_users_code(key: str, made: Any) -> Any:
    """Return a `Model`, a `Dataset` or the like with `users_code` for each of its functions."""
    known = isinstance(made, tuple | Batches)
    kinds = getattr(type(made), "__annotations__", {}) if known else {}
    functions = {
        name: users_code(key, getattr(made, name), _GIVES.get(name, ""), _GIVEN.get(name, ""))
        for name, kind in kinds.items()
        if "Callable" in str(kind) and (getattr(made, name) is not None or "None" not in str(kind))
    }
    fields = (functions.get(name, getattr(made, name)) for name in kinds)
    return type(made)(*fields) if functions else made


def _not_found(key: str, name: str) -> InputError:
    return InputError(f"{key}={name} is not found; install it, or put its folder on PYTHONPATH")


def _fields(options: Any) -> Any:
    """Return the options for a module: the section's settings; for a user's own its `options`."""
    if options.name != "custom":
        return options
    return SimpleNamespace(name=options.module, **options.options)
