"""A model in a folder as Hugging Face `transformers` keeps it: `config.json` and `*.safetensors`.

What the arrays are named there stands in a family's own module
(`launcher.recipes.models.hugging_face`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from launcher.arrays.npz import Header
from launcher.base import DamagedError, read_json, write_whole
from launcher.recipes.models.hugging_face import CONFIG, Tensor, family_of, options_in, read_config

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_LARGEST_FILE = 4 * 2**30  # bytes of arrays in a file that is written: they are read together
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
        by_name = {tensor.theirs: tensor for tensor in self._tensors()}
        found: dict[str, Header] = {}
        kept = self._kept()
        for file in dict.fromkeys(file for file, _ in kept.values()):
            with _opened(file) as archive:
                held = set(archive.keys())
                for name, stored in ((name, one) for name, (at, one) in kept.items() if at == file):
                    if stored not in held:
                        raise DamagedError(f"{file.name} lacks {stored}, which {_INDEX} lists")
                    if not _is_dispensable(name, by_name):
                        tensor = by_name.get(name)
                        header = _header(archive.get_slice(stored), name, tensor)
                        found[f"params.{tensor.ours}" if tensor else name] = header
        if missing := [name for name in by_name if name not in kept]:
            raise DamagedError(f"it has no {missing[0]}")
        return found

    @contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[Callable[[str], np.ndarray]]:
        """Give a function that reads an array by its flat name; no two are held here at a time."""
        del names
        kept = self._kept()
        tensors: dict[str, list[Tensor]] = {}
        for tensor in self._tensors():
            tensors.setdefault(f"params.{tensor.ours}", []).append(tensor)
        with ExitStack() as stack:
            archives: dict[Path, Any] = {}

            def read_one(tensor: Tensor) -> np.ndarray:
                file, stored = kept[tensor.theirs]
                if file not in archives:
                    archives[file] = stack.enter_context(_opened(file))
                return tensor.to_ours(archives[file].get_tensor(stored))

            def read(name: str) -> np.ndarray:
                first, *_ = tensors[name]
                if first.part is None:
                    return read_one(first)
                return np.stack([read_one(one) for one in tensors[name]], first.part[0])

            yield read

    def _tensors(self) -> list[Tensor]:
        config = read_config(self._path)
        family = family_of(config)
        return list(family.tensors(SimpleNamespace(**options_in(family, config))))

    def _kept(self) -> dict[str, tuple[Path, str]]:
        """Return the file of each array, and its name in it, by the name that it has today."""
        family = family_of(read_config(self._path))
        current: Callable[[str], str | None] = getattr(family, "current_name", lambda name: name)
        found = {}
        for stored, file in self._files().items():
            if (name := current(stored)) is not None:
                found[name] = file, stored
        return found

    def _files(self) -> dict[str, Path]:
        """Return the file of each array, by the array's name there."""
        index = self._path / _INDEX
        if not index.exists():
            files = [self._path / _WHOLE]
            if not files[0].exists():
                raise DamagedError(f"it has a {CONFIG}, but no {_WHOLE} and no {_INDEX}")
            with _opened(files[0]) as archive:
                return dict.fromkeys(archive.keys(), files[0])
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


def _is_dispensable(name: str, known: Mapping[str, Tensor]) -> bool:
    """Return whether an array is a buffer of older versions, or a tied one written twice."""
    is_tied = name == "lm_head.weight" and name not in known
    return is_tied or name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))
