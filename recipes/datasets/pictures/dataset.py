"""Pictures on disk, decoded as they are needed: folders, tar files, `.npz` files."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from launcher.recipes import Batch, Dataset, InputError
from launcher.recipes.data.batches import batches, held_out
from launcher.recipes.data.skipping import BadSampleError, Skipping
from launcher.recipes.datasets.pictures import Pictures
from launcher.recipes.datasets.pictures.decode import Fitting, check_pillow, open_picture
from launcher.recipes.datasets.pictures.index import (
    PictureIndex,
    PictureSource,
    index_fingerprint,
    kept_index,
    load_index,
    refused_picture,
)
from launcher.recipes.datasets.pictures.scan import source_files

_THREADS = 16


class _PictureSplit(NamedTuple):
    """The pictures of training and those held out: an index, numbers of its pictures, classes."""

    train: PictureIndex
    train_numbers: np.ndarray
    held: PictureIndex
    held_numbers: np.ndarray


def check(options: Pictures, model_options: Any, validation: bool) -> None:
    """Refuse pictures that do not fit the model.

    What is not known before `prepare` has run is not checked: files that are still to be read
    through are only looked for.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        validation: whether the run evaluates.

    Raises:
        InputError: there are none, they do not fit the model, or a picture is bad.
    """
    check_pillow()
    _fitting(options, model_options)
    if not is_prepared(options):
        for source in _sources(options):
            source_files(source.path, source.format, source.key)
        return
    split = _split(options)
    _labels(options, model_options, split.train, split.train)
    _labels(options, model_options, split.held, split.train)
    if validation and not len(split.held_numbers):
        raise InputError(
            f"dataset.validation_fraction={options.validation_fraction} of dataset.path="
            f"{options.path} holds out no picture to evaluate on; raise it, name held-out ones "
            "with dataset.validation_path, or set train.eval_every=0"
        )


def is_prepared(options: Pictures) -> bool:
    """Return whether nothing has to be read through or decoded to know the pictures."""
    quick = options.format != "tar" and options.bad == "refuse"
    return quick or all(kept_index(source) is not None for source in _sources(options))


def prepare(options: Pictures, processes: int, progress: Callable[[float], None]) -> str:
    """Find all pictures, decode them all where bad ones are to be left out, and keep the index.

    Args:
        options: the dataset's settings.
        processes: unused: threads decode.
        progress: takes the share done, 0 to 1.

    Returns:
        What was found, in a line.
    """
    del processes
    check_pillow()
    lines = []
    for source in _sources(options):
        index = load_index(source, progress)
        lines.append(f"{len(index):,} pictures are in {source.path}{_left_out(index)}")
        lines += [note.removeprefix("; ") for note in index.notes if note]
    return "; ".join(lines)


def build(options: Pictures, model_options: Any, global_batch_size: int, seed: int) -> Dataset:
    """Return batches of `image`, float32 [rows, size, size, channels], and `label`, int32 [rows].

    Pictures without classes have no label. Random parts and mirrored pictures are drawn anew for
    each pass, by the seed, the pass and the picture alone.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        global_batch_size: the samples of a batch.
        seed: picks the order of the training data, and what is drawn.
    """
    split, fitting = _split(options), _fitting(options, model_options)

    def rows(index: PictureIndex, numbers: np.ndarray, fitting: Fitting) -> _Rows:
        labels = _labels(options, model_options, index, split.train)
        skipping = Skipping(len(numbers), "pictures") if options.bad == "skip" else None
        return _Rows(index, numbers, labels, fitting, options.format, seed, skipping)

    train = rows(split.train, split.train_numbers, fitting)
    count, held = len(split.train_numbers), len(split.held_numbers)
    made = batches(count, global_batch_size, seed, train)
    if fitting.is_random:
        made = replace(made, numbers=_with_passes(made.numbers, count, global_batch_size))
    whole = replace(fitting, smallest_crop=1.0, flip=False)
    held_rows = rows(split.held, split.held_numbers, whole)
    classes = f" of {len(split.train.classes):,} classes" if split.train.classes else ""
    end = f"{held:,} held out for validation" if held else "none held out"
    end += "".join(dict.fromkeys((*split.train.notes, *split.held.notes)))
    return Dataset(
        train=made,
        validation=held_out(held, global_batch_size, held_rows),
        describe=f"{options.path}: {count:,} pictures{classes}{_left_out(split.train)}, {end}",
    )


def fingerprint(options: Pictures) -> str:
    """Return a digest of the pictures' names, classes and sizes, and of samples of them."""
    return " ".join(index_fingerprint(s, load_index(s)) for s in _sources(options))


def _with_passes(
    numbers: Callable[[int], np.ndarray], count: int, batch_size: int
) -> Callable[[int], np.ndarray]:
    """Return sample numbers to which the number of the pass is added, times that of samples."""

    def numbers_and_passes(k: int) -> np.ndarray:
        places = np.arange(k * batch_size, (k + 1) * batch_size)
        return numbers(k) + places // count * count

    return numbers_and_passes


@dataclass(frozen=True)
class _Rows:
    """Makes rows of sample numbers."""

    index: PictureIndex
    numbers: np.ndarray
    labels: np.ndarray | None
    fitting: Fitting
    format: str
    seed: int
    skipping: Skipping | None

    def __call__(self, which: np.ndarray) -> Batch:
        """Return the rows of these sample numbers; raises InputError for a bad picture."""
        passes, samples = np.divmod(which, len(self.numbers))
        try:
            read = list(self._threads.map(self._read, samples, passes))
        except BadSampleError as error:
            raise refused_picture(str(error)) from None
        images, numbers = zip(*read, strict=True)
        batch = {"image": np.stack(images)}
        if self.labels is not None:
            batch["label"] = self.labels[list(numbers)].astype(np.int32)
        return batch

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0))))

    def _read(self, sample: int, number_of_pass: int) -> tuple[np.ndarray, int]:
        read = functools.partial(self._picture, number_of_pass=int(number_of_pass))
        return read(int(sample)) if self.skipping is None else self.skipping(read, int(sample))

    def _picture(self, sample: int, number_of_pass: int) -> tuple[np.ndarray, int]:
        """Return a sample's picture and its number; raise BadSampleError if it is bad."""
        number, rng, index = int(self.numbers[sample]), None, self.index
        if self.fitting.is_random:
            rng = np.random.default_rng([self.seed, number_of_pass, number])
        file = index.files[index.file[number]]
        where = int(index.start[number]), int(index.size[number])
        try:
            return self.fitting.array(open_picture(file, *where, self.format), rng), number
        except BadSampleError as error:
            raise BadSampleError(f"{index.place(number)}: {error}") from None


def _sources(options: Pictures) -> list[PictureSource]:
    source = PictureSource(options.path, options.format, options.bad)
    if options.validation_path is None:
        return [source]
    return [source, replace(source, path=options.validation_path, key="dataset.validation_path")]


def _split(options: Pictures) -> _PictureSplit:
    train, *rest = [load_index(source) for source in _sources(options)]
    if rest:
        return _PictureSplit(train, np.arange(len(train)), rest[0], np.arange(len(rest[0])))
    # They come class by class: which are held out is drawn, always alike.
    order = np.random.default_rng(0).permutation(len(train))
    stop = len(train) - int(options.validation_fraction * len(train))
    return _PictureSplit(train, np.sort(order[:stop]), train, np.sort(order[stop:]))


def _fitting(options: Pictures, model: Any) -> Fitting:
    size, channels = (getattr(model, name, None) for name in ("image_size", "channels"))
    if not size or channels not in (1, 3, 4):
        there = "does not take pictures" if not size else f"takes {channels} channels"
        raise InputError(
            f"model.name={model.name} {there}; dataset=pictures is for models with "
            "model.image_size and 1, 3 or 4 model.channels"
        )
    how = (getattr(options, n) for n in ("fit", "smallest_crop", "flip", "mean", "std"))
    return Fitting(size, channels, *how)


def _labels(
    options: Pictures, model: Any, index: PictureIndex, train: PictureIndex
) -> np.ndarray | None:
    """Return the class of each picture, numbers as they are, names by their place in training's.

    Raises:
        InputError: the model has other classes, or a picture has none.
    """
    if (wanted := getattr(model, "num_classes", None)) is None:
        return None
    if (without := np.flatnonzero(index.label < 0)).size:
        raise InputError(
            f"{index.place(int(without[0]))} has no class, and model.name={model.name} learns "
            "classes; put each class into a folder of its own, or name it in a .cls or .csv file"
        )
    if all(name.isdecimal() for name in train.classes):
        known = {name: int(name) for name in train.classes}
    else:
        known = {name: number for number, name in enumerate(train.classes)}
    if unknown := [name for name in index.classes if name not in known]:
        raise InputError(
            f"dataset.validation_path={options.validation_path} has the class {unknown[0]!r}, "
            f"which dataset.path={options.path} does not have"
        )
    if known and (most := max(known.values())) >= wanted:
        raise InputError(
            f"dataset.path={options.path} has {len(known):,} classes, of numbers up to {most}, "
            f"more than model.num_classes={wanted}; set model.num_classes={most + 1}"
        )
    labels: np.ndarray = np.array([known[name] for name in index.classes], np.int64)[index.label]
    return labels


def _left_out(index: PictureIndex) -> str:
    if not index.bad:
        return ""
    return f" ({len(index.bad):,} bad ones are left out, first {index.bad[0]})"
