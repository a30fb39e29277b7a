"""A file's content in a few bytes, without reading all of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

_SAMPLES = 16
_SAMPLE = 2**14  # bytes


def fingerprint_of(paths: Iterable[Path]) -> str:
    """Return a digest of files, in their order: of their sizes, and of 16 samples of each.

    A file of up to 256 KiB is read whole; of a larger one its beginning, its end and places between
    them. It detects another corpus or file, but hardly a single changed byte.
    """
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size}\n".encode())
            starts = list(range(0, size, _SAMPLE))
            if len(starts) > _SAMPLES:
                starts = [i * (size - _SAMPLE) // (_SAMPLES - 1) for i in range(_SAMPLES)]
            for start in starts:
                digest.update(os.pread(file.fileno(), _SAMPLE, start))
    return digest.hexdigest()[:32]
