"""The user's own arrays, from one `.npz` file: a row of each is a sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from launcher.arrays.npz import Header, read_arrays, read_headers
from launcher.base import DamagedError, missing_path
from launcher.config.families import taken_by
from launcher.recipes import Batch, Batches, Dataset, InputError
from launcher.recipes.data.batches import batches, held_out
from launcher.recipes.data.files import fingerprint_of
from launcher.recipes.datasets.arrays import Arrays

_KINDS = "biufc"  # booleans and numbers, as NumPy names them
_REMEDY = "write one with numpy.savez(path, x=x, y=y)"
# The arrays that models of a kind take, with the setting that is the length of a row.
_WANTED = {
    "text": {"tokens": "sequence_length", "targets": "sequence_length"},
    "vectors": {"x": "input_size", "y": "output_size"},
}


def check(options: Arrays, model_options: Any, validation: bool) -> None:
    """Refuse a file that cannot be used, by the names, shapes and types of its arrays.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        validation: whether the run evaluates.

    Raises:
        InputError: the file is not there or odd, or its arrays do not fit the model or one another.
    """
    _, learned, held = _find(options, model_options)
    if validation and not held:
        raise InputError(
            f"dataset.validation_fraction={options.validation_fraction} of the {learned} "
            f"examples of dataset.path={options.path} holds none out to evaluate on; raise it, or "
            "set train.eval_every=0"
        )


def build(options: Arrays, model_options: Any, global_batch_size: int, seed: int) -> Dataset:
    """Return batches of the file's arrays, each [global_batch_size, …], in JAX's types.

    The last rows are held out. Unless `options.shuffle`, batches are cut from the rows in their
    order, one pass after another. The arrays are read into memory.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        global_batch_size: the samples of a batch.
        seed: picks the order of the training data.
    """
    names, learned, count = _find(options, model_options)
    try:
        read = read_arrays(Path(options.path).expanduser(), names)
    except DamagedError as error:
        raise _damaged(options.path, error) from None
    arrays = _converted(options, model_options, read)

    def rows_from(first: int) -> Callable[[np.ndarray], Batch]:
        return lambda which: {name: array[first + which] for name, array in arrays.items()}

    size, gather, held = global_batch_size, rows_from(0), rows_from(learned)
    if options.shuffle:
        train = batches(learned, size, seed, gather)
        validation = held_out(count, size, held)
    else:
        train = Batches(lambda k: np.arange(k * size, (k + 1) * size) % learned, gather)
        validation = Batches(lambda k: np.arange(k * size, min((k + 1) * size, count)), held, count)
    end = f"the last {count:,} held out for validation" if count else "none held out"
    order = "" if options.shuffle else ", in their order"
    return Dataset(
        train=train,
        validation=validation if count else None,
        describe=f"{options.path}: {learned + count:,} examples of {' and '.join(names)}"
        f"{order}, {end}",
    )


def fingerprint(options: Arrays) -> str:
    """Return a digest of the file, from samples of it."""
    _headers(options.path)  # refuses what cannot be used
    return fingerprint_of([Path(options.path).expanduser()])


def _find(options: Arrays, model_options: Any) -> tuple[tuple[str, ...], int, int]:
    """Choose the arrays by the file's headers, and split their rows.

    Returns:
        The names of the arrays, and how many rows of each are to be learned and how many held out.
    """
    source, headers = f"dataset.path={options.path}", _headers(options.path)
    wanted = _wanted(options, model_options)
    names = tuple(options.names or wanted or headers)
    here = ", ".join(sorted(headers)) or "no array"
    for name in names:
        if name not in headers:
            who = f"model.name={model_options.name} takes" if wanted else "dataset.names names"
            raise InputError(
                f"{source} has no array {name!r}, which {who}; it has {here}: save it under that "
                "name, or say with dataset.names which to take"
            )
    _check_rows(source, {name: headers[name] for name in names})
    for name, setting in wanted.items():
        _check_fit(f"{source}: {name!r}", headers[name], model_options, setting)
    rows = headers[names[0]].shape[0]
    held = int(options.validation_fraction * rows)
    return names, rows - held, held


def _headers(path: str) -> dict[str, Header]:
    file = Path(path).expanduser()
    if not file.exists():
        raise InputError(f"dataset.path={path} {missing_path(file)}; {_REMEDY}")
    try:
        headers = read_headers(file)
    except DamagedError as error:
        raise _damaged(path, error) from None
    except PermissionError:
        raise InputError(
            f"dataset.path={path}: you may not read it; change its permissions or name another file"
        ) from None
    if not headers:
        raise InputError(f"dataset.path={path} holds no array; {_REMEDY}")
    return headers


def _damaged(path: str, error: DamagedError) -> InputError:
    return InputError(f"dataset.path={path} cannot be used: {error}; {_REMEDY}")


def _wanted(options: Arrays, model: Any) -> dict[str, str]:
    """Return the arrays that a model takes, as in `_WANTED`; empty if settings imply none."""
    return {} if options.names else _WANTED.get(taken_by(model), {})


def _check_rows(source: str, headers: dict[str, Header]) -> None:
    """Check that all arrays hold numbers, and as many rows as one another."""
    for name, header in headers.items():
        if header.dtype.kind not in _KINDS:
            raise InputError(f"{source}: {name!r} is of type {header.dtype}; it must hold numbers")
        if not header.shape:
            raise InputError(
                f"{source}: {name!r} is one number; it must have a row for each example"
            )
    lengths = {name: header.shape[0] for name, header in headers.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {rows}" for name, rows in lengths.items())
        raise InputError(
            f"{source}: its arrays have different numbers of examples ({counts}); a row of each is "
            "one: save as many, or say with dataset.names which to take"
        )
    if not max(lengths.values()):
        raise InputError(f"{source}: its arrays have no examples; save at least one")


def _check_fit(name: str, header: Header, model: Any, setting: str) -> None:
    """Check that an array has the rows that the model takes."""
    length = getattr(model, setting)
    if header.shape[1:] != (length,):
        shape = ", ".join(str(size) for size in header.shape)
        raise InputError(
            f"{name} has the shape [{shape}], and the model takes [examples, {length}]; "
            f"set model.{setting}, or save it in that shape"
        )
    if taken_by(model) == "text" and header.dtype.kind not in "iu":
        raise InputError(f"{name} is of type {header.dtype}; the model takes integers")


def _converted(options: Arrays, model: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays in the types that JAX has them in, 64 bits as 32; refuse what does not fit."""
    import jax  # here, not above: checking a dataset must not import it

    converted = {}
    for name, array in arrays.items():
        where, dtype = f"dataset.path={options.path}: {name!r}", array.dtype
        array = array.astype(jax.dtypes.canonicalize_dtype(dtype.newbyteorder("=")))
        if dtype.kind in "iu" and not np.array_equal(array, arrays[name]):
            raise InputError(f"{where} holds numbers that do not fit into {array.dtype}")
        if taken_by(model) == "text" and name in _wanted(options, model):
            low, high = int(array.min()), int(array.max())
            if low < 0 or high >= model.vocab_size:
                raise InputError(
                    f"{where} holds {low if low < 0 else high}, which is not a token of "
                    f"model.vocab_size={model.vocab_size}"
                )
        converted[name] = array
    return converted
