"""Read one picture: its bytes, its points, and its part that a model of a fixed size takes."""

from __future__ import annotations

import functools
import io
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from launcher.arrays.npz import read_arrays
from launcher.base import lacking
from launcher.recipes import InputError
from launcher.recipes.data.skipping import BadSampleError

if TYPE_CHECKING:
    from PIL import Image

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by the number of channels
_RATIOS = math.log(3 / 4), math.log(4 / 3)  # of a random part's sides
_TRIES = 10
_LOADING = threading.Lock()  # threads that all miss an .npz file would each hold a copy of it


@contextmanager
def _read() -> Iterator[None]:
    """Raise BadSampleError, with a few words, for what goes wrong with a picture."""
    try:
        yield
    except BadSampleError:
        raise
    except FileNotFoundError:
        raise BadSampleError("it is missing") from None
    except Exception as error:  # each format's decoder raises its own
        text = " ".join(str(error).split()) or type(error).__name__
        unknown = "cannot identify" in text
        text = "it is not a picture that Pillow reads" if unknown else text
        raise BadSampleError(text) from None


@dataclass(frozen=True)
class Fitting:
    """How a picture becomes an array.

    Attributes:
        size: the sides of the array.
        channels: 1, 3 or 4.
        fit: of another shape: crop, pad or stretch.
        smallest_crop: the smallest share of a random part's area; 1: there is none.
        flip: whether half of them are mirrored.
        mean: is subtracted from the points, which are from 0 to 1.
        std: then divides them.
    """

    size: int
    channels: int
    fit: str
    smallest_crop: float = 1.0
    flip: bool = False
    mean: float = 0.0
    std: float = 1.0

    @property
    def is_random(self) -> bool:
        """Whether a picture is another one at each pass."""
        return self.smallest_crop < 1 or self.flip

    @_read()
    def array(self, picture: Image.Image, rng: np.random.Generator | None) -> np.ndarray:
        """Return a picture as float32 [size, size, channels].

        Args:
            picture: as `open_picture` returns it.
            rng: draws a part, and whether it is mirrored; None: neither is done.

        Raises:
            BadSampleError: it is damaged.
        """
        from PIL import Image, ImageOps

        # A JPEG is decoded at a fraction of its size, where that is enough.
        enough = math.ceil(self.size / math.sqrt(self.smallest_crop))
        picture.draft(None, (enough, enough))
        picture = _of_8_bits(_upright(picture)).convert(_MODES[self.channels])
        box, side = None, (self.size, self.size)
        if rng is not None and self.smallest_crop < 1:
            box = _random_box(picture.size, self.smallest_crop, rng)
        if box is not None or self.fit == "stretch":
            picture = picture.resize(side, Image.Resampling.BILINEAR, box, 2.0)
        elif picture.size != side:
            fitted = ImageOps.fit if self.fit == "crop" else ImageOps.pad
            picture = fitted(picture, side, Image.Resampling.BILINEAR)
        points = np.asarray(picture, np.float32).reshape(*side, self.channels) / 255
        if rng is not None and self.flip and rng.random() < 0.5:
            points = points[:, ::-1]
        return (points - np.float32(self.mean)) / np.float32(self.std)


def check_pillow() -> None:
    """Raise InputError where Pillow is not installed."""
    if command := lacking("PIL"):
        raise InputError(f"dataset=pictures needs Pillow; {command}")


@_read()
def open_picture(file: str, start: int, size: int, format: str) -> Image.Image:
    """Return a picture, of which a file's content may still be undecoded.

    Args:
        file: its file.
        start: where it begins: a byte, or of `.npz` files a row.
        size: its bytes; what is a file of its own may have become longer or shorter.
        format: folder, tar or npz.

    Raises:
        BadSampleError: it is not there, or no picture.
    """
    from PIL import Image

    if format == "npz":
        with _LOADING:
            rows = _rows(file)
        return Image.fromarray(rows[start].squeeze())
    with open(file, "rb") as stream:
        stream.seek(start)
        content = stream.read() if format == "folder" else stream.read(size)
    if format != "folder" and len(content) < size:
        raise BadSampleError(f"{len(content):,} bytes of {size:,} are there")
    return Image.open(io.BytesIO(content))


@_read()
def check_whole(picture: Image.Image) -> None:
    """Raise BadSampleError if a picture cannot be decoded."""
    picture.load()
    _of_8_bits(picture)


def _upright(picture: Image.Image) -> Image.Image:
    """Return a picture turned as its camera was held.

    Damaged EXIF is passed over, as it says nothing of the points. (`ImageOps.exif_transpose` would
    write all of it anew, and fails where one tag is of another type than its name has.)
    """
    from PIL import ExifTags
    from PIL.Image import Transpose

    picture.load()
    try:
        orientation = picture.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # each damage has its own
        return picture
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return picture.transpose(turns[orientation]) if orientation in turns else picture


def _of_8_bits(picture: Image.Image) -> Image.Image:
    """Return a grey picture of 16 bits with 8, to which Pillow would cut what is above 255."""
    from PIL import Image

    if picture.mode in ("I", "F"):
        raise BadSampleError(f"its points are of Pillow's mode {picture.mode}, of no known range")
    if not picture.mode.startswith("I;16"):
        return picture
    return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))


@functools.lru_cache(None)
def _rows(file: str) -> np.ndarray:
    """Return the pictures of an `.npz` file, which stay in memory."""
    return read_arrays(Path(file), ["image"])["image"]


def _random_box(
    size: tuple[int, int], smallest: float, rng: np.random.Generator
) -> tuple[int, int, int, int] | None:
    """Return a part of a picture, or None where none fits.

    (Szegedy et al., 2015, "Going Deeper with Convolutions": shares of the area and ratios of the
    sides are drawn.)
    """
    width, height = size
    for _ in range(_TRIES):
        area = width * height * rng.uniform(smallest, 1)
        ratio = math.exp(rng.uniform(*_RATIOS))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(rng.integers(width - w + 1))
            top = int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    return None
