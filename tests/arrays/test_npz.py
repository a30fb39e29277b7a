"""`launcher/arrays/npz.py`: what NumPy writes is read, anything else is refused in one line."""

import io
import os
import pickle
import resource
import zipfile

import numpy as np
import pytest

from launcher.arrays.npz import read_arrays, read_headers, write_arrays
from launcher.base.files import DamagedError

ARRAYS = {
    "a": np.arange(6, dtype=np.int16).reshape(2, 3),
    "b.c": np.asfortranarray(np.arange(6.0).reshape(3, 2)),
    "one": np.float64(2.5),
    "none": np.zeros((0, 4), bool),
    "big": np.arange(3, dtype=">f4"),
}


def npy(array):
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def archive(path, compression=zipfile.ZIP_STORED, **members):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name.replace("__", "."), content)
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, None])
def test_arrays_come_back(tmp_path, save):
    path = tmp_path / "x.npz"
    write_arrays(path, ARRAYS) if save is None else save(path, **ARRAYS)
    for name, header in read_headers(path).items():
        assert (header.shape, header.dtype) == (ARRAYS[name].shape, ARRAYS[name].dtype)
    for read in (read_arrays(path), np.load(path)):
        assert set(read) == set(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(read[name], array)
            assert read[name].dtype == array.dtype
    assert set(read_arrays(path, ["a"])) == {"a"}


def test_the_same_arrays_make_the_same_bytes_and_only_their_user_reads_them(tmp_path):
    for name in ("x.npz", "y.npz"):
        write_arrays(tmp_path / name, ARRAYS, private=True)
    assert (tmp_path / "x.npz").read_bytes() == (tmp_path / "y.npz").read_bytes()
    assert (tmp_path / "x.npz").stat().st_mode & 0o777 == 0o600


def test_a_disk_that_takes_no_more_keeps_the_file_that_was_there(tmp_path):
    path = tmp_path / "x.npz"
    write_arrays(path, ARRAYS)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
        with pytest.raises(OSError, match="File too large") as error:
            write_arrays(path, {"a": np.zeros(2**20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == str(path)
    assert os.listdir(tmp_path) == ["x.npz"]
    assert path.read_bytes() == before


def odd(tmp_path):
    """Files that hold no plain arrays, each with how its error begins."""
    path, whole = tmp_path / "odd.npz", npy(np.arange(600.0))
    for content in (b"", pickle.dumps({"a": 1}), whole):
        yield path, content, "it is not an .npz file"
    for members in (
        {"a__txt": b"hello"},
        {"a__npy": b"hello"},
        {"a__npy": whole[:-8]},
        {"a__npy": b"\x93NUMPY\x09" + whole[7:]},
        {"a__npy": whole.replace(b"(600,)", b"(6**9)")},
        {"a__npy": npy(np.array([{}], object))},
        {"a__npy": whole.replace(b"(600,), }   ", b"(10**15,), }")},
        {"a__npy": whole.replace(b"(600,), }      ", b"(600000000,), }")},
    ):
        yield archive(path, **members), None, "it does not hold plain arrays ("
    flipped = bytearray(archive(path, a__npy=whole).read_bytes())
    flipped[500] ^= 1
    yield path, bytes(flipped), "it is not an .npz file (Bad CRC-32 for file 'a.npy')"
    yield path, bytes(flipped[:-30]), "it is not an .npz file"


def test_what_is_no_file_of_plain_arrays_is_refused_in_one_line(tmp_path):
    for path, content, text in odd(tmp_path):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DamagedError) as error:
            read_headers(path), read_arrays(path)
        assert str(error.value).startswith(text)
    with pytest.raises(DamagedError, match="is no array"):
        read_arrays(archive(tmp_path / "text.npz", a__npy=b"hello"))


def test_what_is_no_file_blocks_nobody(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(DamagedError, match="it is not a regular file"):
            read_headers(path)
    with pytest.raises(FileNotFoundError):
        read_headers(tmp_path / "none")
