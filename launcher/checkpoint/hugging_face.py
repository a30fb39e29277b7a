"""A model in a folder as Hugging Face `transformers` keeps it: `config.json` and `*.safetensors`.

What the arrays are named there stands in a family's own module
(`launcher.recipes.models.hugging_face`).
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from launcher.arrays.npz import Header
from launcher.base import DamagedError, read_json, write_whole
from launcher.recipes.models.hugging_face import CONFIG, Tensor, model_in, places_of

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_PICKLED = (
    ", but {}, and unpickling may run any code; if you trust it, python -c "
    "\"from transformers import {} as M; M.from_pretrained('.').save_pretrained('.')\" "
    "in that folder writes it anew"
)
_LARGEST_FILE = 4 * 2**30  # bytes of arrays in a file that is written: they are read together
_SAMPLES = 64  # rows of an array that is stored twice, which are compared
_DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "bfloat16"}


class HuggingFace:
    """A folder with `config.json` and `*.safetensors`, as `transformers` writes it.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def headers(self) -> dict[str, Header]:
        """Return the shape and type of each array, by its flat name; of a further one, by its own.

        Raises:
            OSError: a file cannot be read.
            DamagedError: the files are not those of `config.json`.
        """
        by_name = {tensor.theirs: tensor for tensor in self._model[1]}
        found: dict[str, Header] = {}
        kept = self._kept()
        if missing := [name for name in by_name if name not in kept]:
            raise DamagedError(self._lacks(missing, [name for name in kept if name not in by_name]))
        with _archives() as archive:
            held = functools.cache(lambda file: frozenset(archive(file).keys()))
            for name, places in kept.items():
                for file, stored in places:
                    if stored not in held(file):
                        raise DamagedError(f"{file.name} lacks {stored}, which {_INDEX} lists")
                tensor = by_name.get(name)
                slices = {stored: archive(file).get_slice(stored) for file, stored in places}
                headers = [_header(one, stored, tensor) for stored, one in slices.items()]
                found[f"params.{tensor.ours}" if tensor else name] = headers[0]
                if not _are_alike(list(slices.values())):
                    raise DamagedError(
                        f"{' and '.join(slices)} differ, and are one array by {CONFIG} "
                        f"(tie_word_embeddings); correct that, or leave one out"
                    )
        return found

    @contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[Callable[[str], np.ndarray]]:
        """Give a function that reads an array by its flat name; no two are held here at a time."""
        del names
        kept = self._kept()
        tensors: dict[str, list[Tensor]] = {}
        for tensor in self._model[1]:
            tensors.setdefault(f"params.{tensor.ours}", []).append(tensor)
        with _archives() as archive:

            def read_one(tensor: Tensor) -> np.ndarray:
                (file, stored), *_ = kept[tensor.theirs]
                return tensor.to_ours(archive(file).get_tensor(stored))

            def read(name: str) -> np.ndarray:
                first, *_ = tensors[name]
                if first.part is None:
                    return read_one(first)
                return np.stack([read_one(one) for one in tensors[name]], first.part[0])

            yield read

    @functools.cached_property
    def _model(self) -> tuple[ModuleType, list[Tensor]]:
        return model_in(self._path)

    def _kept(self) -> dict[str, list[tuple[Path, str]]]:
        """Return the files of each array, and its names in them, by its name in the model."""
        files, (family, tensors) = self._files(), self._model
        places = places_of(family, [tensor.theirs for tensor in tensors], files)
        return {name: [(files[one], one) for one in stored] for name, stored in places.items()}

    def _lacks(self, missing: Sequence[str], further: Sequence[str]) -> str:
        """Return in words which arrays the files lack."""
        prefix = self._model[1][0].theirs.partition(".")[0] + "."
        said = f"it has no {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}"
        if not missing[0].startswith(prefix):
            said += ": it was saved without the model's head"
        return f"{said}; it has {further[0]}" if further else said

    def _files(self) -> dict[str, Path]:
        """Return the file of each array, by the array's name there."""
        index, whole = self._path / _INDEX, self._path / _WHOLE
        if whole.exists():
            with _opened(whole) as archive:
                return dict.fromkeys(archive.keys(), whole)
        if not index.exists():
            first = next(iter(sorted(self._path.glob("pytorch_model*.bin"))), None)
            hint = _PICKLED.format(first.name, self._model[0].AUTO_CLASS) if first else ""
            raise DamagedError(f"it has no {_WHOLE} and no {_INDEX}{hint}")
        named = read_json(index)
        if not isinstance(named, dict) or not isinstance(named.get("weight_map"), dict):
            raise DamagedError(f"{_INDEX} has no weight_map")
        found = {}
        for name, file in named["weight_map"].items():
            if not isinstance(file, str) or Path(file).name != file:
                raise DamagedError(f"{_INDEX} names {file!r}, which is not a file beside it")
            found[name] = self._path / file
        for file in dict.fromkeys(found.values()):
            if not file.exists():
                raise DamagedError(f"it has no {file.name}, which {_INDEX} names")
        return found


def find_hugging_face(path: Path) -> HuggingFace | None:
    """Return the model in a folder; None if it is none of this kind."""
    return HuggingFace(path) if (path / CONFIG).exists() else None


class Folder(NamedTuple):
    """What a folder for `transformers` is to hold, the arrays' values apart.

    Attributes:
        config: the content of `config.json`.
        tensors: the arrays.
        files: further files, such as a tokenizer's, by their names.
    """

    config: Mapping[str, Any]
    tensors: Sequence[Tensor]
    files: Mapping[str, bytes] = MappingProxyType({})


def write_hugging_face(
    target: Path,
    folder: Folder,
    arrays: Callable[[Sequence[str]], Mapping[str, np.ndarray]],
    dtype: str,
    private: bool,
    largest: int = _LARGEST_FILE,
) -> int:
    """Write a folder as `transformers` does, whole or not at all.

    Args:
        target: the folder to write, which is not there yet.
        folder: what it is to hold.
        arrays: reads arrays by their flat names; it is called for those of one file at a time.
        dtype: the type of what is written, "float32" or "bfloat16".
        private: whether only this user may read it; otherwise the umask decides.
        largest: bytes of arrays in one file.

    Returns:
        The number of arrays.

    Raises:
        OSError: it cannot be written.
    """
    groups = list(_groups(folder.tensors, _dtype(dtype).itemsize, largest))
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    partial.mkdir(mode=0o700 if private else 0o777)
    try:
        weight_map: dict[str, str] = {}
        size = 0
        for number, group in enumerate(groups, 1):
            many = len(groups) > 1
            file = f"model-{number:05}-of-{len(groups):05}.safetensors" if many else _WHOLE
            size += _write_file(partial / file, group, arrays, _dtype(dtype), private)
            weight_map |= dict.fromkeys((tensor.theirs for tensor in group), file)
        if len(groups) > 1:
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            write_whole(partial / _INDEX, json.dumps(index, indent=2), private)
        content = json.dumps({**folder.config, "dtype": dtype, "torch_dtype": dtype}, indent=2)
        write_whole(partial / CONFIG, content + "\n", private)
        for file, held in folder.files.items():
            write_whole(partial / file, held, private)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return len(folder.tensors)


def _write_file(
    file: Path,
    group: Sequence[Tensor],
    arrays: Callable[[Sequence[str]], Mapping[str, np.ndarray]],
    dtype: np.dtype,
    private: bool,
) -> int:
    """Write the arrays of one file, of which nothing is held after that; return their bytes."""
    read = arrays(list(dict.fromkeys(f"params.{tensor.ours}" for tensor in group)))
    found = {
        tensor.theirs: tensor.to_theirs(np.asarray(read[f"params.{tensor.ours}"])).astype(dtype)
        for tensor in group
    }
    write_whole(file, save(found, {"format": "pt"}), private)
    return sum(array.nbytes for array in found.values())


def _groups(tensors: Sequence[Tensor], width: int, largest: int) -> Iterator[list[Tensor]]:
    """Yield the arrays of each file, in order."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        more = math.prod(tensor.shape) * width
        if group and size + more > largest:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += more
    yield group


@contextmanager
def _archives() -> Iterator[Callable[[Path], Any]]:
    """Give a function that opens a file, each once."""
    with ExitStack() as stack:
        yield functools.cache(lambda file: stack.enter_context(_opened(file)))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="np") as archive:
            yield archive
    except SafetensorError as error:
        raise DamagedError(f"{file.name} is not a whole safetensors file ({error})") from None


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _header(kept: Any, name: str, tensor: Tensor | None) -> Header:
    """Return the shape, as it is here, and the type of an array."""
    shape, dtype = tuple(kept.get_shape()), kept.get_dtype()
    if dtype not in _DTYPES:
        raise DamagedError(f"{name} is of type {dtype}")
    if tensor is not None and shape != tensor.shape:
        raise DamagedError(f"{name} is {shape}, and {tensor.shape} by {CONFIG}")
    return Header(tensor.shape_here if tensor else shape, _dtype(_DTYPES[dtype]))


def _are_alike(slices: Sequence[Any]) -> bool:
    """Return whether arrays of one shape are the same in samples of their rows."""
    first, *others = slices
    rows = (
        range(0, first.get_shape()[0], max(1, first.get_shape()[0] // _SAMPLES)) if others else ()
    )
    return all(np.array_equal(first[i : i + 1], one[i : i + 1]) for one in others for i in rows)
