"""Files of named arrays, `.npz` as `numpy.savez` writes them: never unpickled, written whole."""

from __future__ import annotations

import lzma
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.lib.npyio import NpzFile

from launcher.base import DamagedError, open_regular, write_whole

_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Header(NamedTuple):
    """An array's shape and type, which a file holds before its contents."""

    shape: tuple[int, ...]
    dtype: np.dtype


def read_headers(path: Path) -> dict[str, Header]:
    """Return the shape and type of each array in a file, by name; read no array.

    Raises:
        OSError: the file cannot be read.
        DamagedError: it is not an `.npz` file of plain arrays.
    """
    found = {}
    with _opened(path) as archive:
        assert archive.zip is not None
        for name in archive.files:
            with archive.zip.open(f"{name}.npy") as member:
                version = np.lib.format.read_magic(member)
                if version not in _READERS:
                    raise ValueError(f"{name!r} is in an unknown version of NumPy's format")
                shape, _, dtype = _READERS[version](member)
            if dtype.hasobject:
                raise ValueError(f"{name!r} holds Python objects, which are not unpickled")
            found[name] = Header(tuple(shape), dtype)
    return found


def read_arrays(path: Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Return arrays of a file by name.

    Args:
        path: the file.
        names: those to read, each in the file; None for all.

    Raises:
        OSError: the file cannot be read.
        DamagedError: it is not an `.npz` file of plain arrays.
    """
    with _opened(path) as archive:
        found = {name: archive[name] for name in (archive.files if names is None else names)}
        if other := next((n for n, x in found.items() if not isinstance(x, np.ndarray)), None):
            raise ValueError(f"{other!r} is no array")
        return found


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], private: bool = False) -> None:
    """Write a file whole or not at all; the same arrays make the same bytes.

    Args:
        path: the file.
        arrays: the arrays by name; none holds Python objects.
        private: whether only this user may read it; otherwise the umask decides.

    Raises:
        OSError: it cannot be written; the error names the file.
    """

    def write(file: IO[bytes]) -> None:  # `numpy.savez` has no array named `file`
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    write_whole(path, write, private)


_DAMAGE = (zlib.error, lzma.LZMAError)  # of what is compressed


@contextmanager
def _opened(path: Path) -> Iterator[NpzFile]:
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        try:
            if not zipfile.is_zipfile(file):
                raise DamagedError("it is not an .npz file")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                yield archive
        except DamagedError:
            raise
        except zipfile.BadZipFile as error:
            raise DamagedError(f"it is not an .npz file ({error})") from None
        except MemoryError:
            raise DamagedError("its arrays do not fit into memory") from None
        except (ValueError, KeyError, EOFError, RuntimeError, *_DAMAGE) as error:
            raise DamagedError(f"it does not hold plain arrays ({error})") from None
