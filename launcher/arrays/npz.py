"""Files of named arrays, `.npz` as `numpy.savez` writes them: read strictly, written whole.

Nothing is unpickled, and no header is trusted with memory that the file does not fill.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from launcher.base.files import DamagedError, open_regular, write_whole

_SUFFIX = ".npy"
_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what NumPy writes
# What `zipfile` and NumPy raise where a file holds anything else; a password is a RuntimeError.
_ODD = (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, struct.error)


class Header(NamedTuple):
    """What a file says of an array before its contents."""

    shape: tuple[int, ...]
    dtype: np.dtype


def read_headers(path: Path) -> dict[str, Header]:
    """Return the shape and type of each array in a file, by name; read no array.

    Raises:
        OSError: the file cannot be read.
        DamagedError: it is not an `.npz` file of plain arrays.
    """
    with _opened(path) as archive:
        return {name: _header(archive, info) for name, info in _members(archive)}


def read_arrays(path: Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Return arrays of a file by name.

    Args:
        path: the file.
        names: those to read, each in the file; None for all.

    Raises:
        OSError: the file cannot be read.
        DamagedError: it is not an `.npz` file of plain arrays.
    """
    wanted, arrays = None if names is None else set(names), {}
    with _opened(path) as archive:
        for name, info in _members(archive):
            if wanted is None or name in wanted:
                _header(archive, info)
                with archive.open(info) as member:
                    arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
    return arrays


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], private: bool = False) -> None:
    """Write a file whole or not at all; the same arrays make the same bytes.

    Args:
        path: the file.
        arrays: the arrays by name; none holds Python objects.
        private: whether only this user may read it; otherwise the umask decides.

    Raises:
        OSError: it cannot be written; the error names the file.
    """

    def write(file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                info = zipfile.ZipInfo(name + _SUFFIX)  # of no date
                with archive.open(info, "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    write_whole(path, write, private)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                yield archive
        except DamagedError:
            raise
        except zipfile.BadZipFile as error:
            raise DamagedError(f"it is not an .npz file ({error})") from None
        except MemoryError:
            raise DamagedError("its arrays do not fit into memory") from None
        except _ODD as error:
            raise DamagedError(f"it does not hold plain arrays ({error})") from None


def _members(archive: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """Yield the name of each array and where it is."""
    seen = set()
    for info in archive.infolist():
        name = info.filename.removesuffix(_SUFFIX)
        if name == info.filename:
            raise DamagedError(f"it holds {name!r}, which is not an array")
        if name in seen:
            raise DamagedError(f"it holds {name!r} twice")
        if info.compress_type not in _COMPRESSION:
            raise DamagedError(f"{name!r} is compressed in a way that NumPy does not write")
        seen.add(name)
        yield name, info


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Header:
    """Return what the file says of an array, checked against the size of its contents."""
    name = info.filename.removesuffix(_SUFFIX)
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version not in _READERS:
            raise DamagedError(f"{name!r} is in an unknown version of NumPy's format")
        shape, _, dtype = _READERS[version](member)
        begins = member.tell()
    if dtype.hasobject:
        raise DamagedError(f"{name!r} holds Python objects, which are not unpickled")
    if info.file_size != begins + math.prod(shape) * dtype.itemsize:
        raise DamagedError(f"{name!r} is not as long as its shape says")
    return Header(tuple(shape), dtype)
