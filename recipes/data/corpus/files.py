"""Token files: which there are, how long they are, and reading a range of them.

Ranges of tokens are read and not mapped: a corpus may be larger than memory, a file that is cut
short gives an error and no signal, and pages are the kernel's to keep or drop.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from launcher.base import write_whole
from launcher.recipes.data.corpus.sources import SUFFIXES
from launcher.recipes.data.file_access import FileAccess
from launcher.recipes.data.files import with_ending
from launcher.recipes.data.stored_files import access_to
from launcher.recipes.protocols import InputError

META = "meta.json"
_FORMAT = 1
_COUNTS = ("tokens", "documents", "skipped", "text_bytes")  # of all parts, for people


@dataclass(frozen=True)
class TokenPart:
    """One token file: `<name>.bin`, and `<name>.ends` where its documents end.

    Attributes:
        name: the files' name.
        key: a digest of what it was made of: source, tokenizer, settings.
        tokens: the number of tokens.
        documents: the number of documents.
        skipped: the number of bad documents that were left out.
        first_bad: the first of them, and why.
        digest: of the tokens, SHA-256.
        text_bytes: the length of the documents as UTF-8, of which `<name>.bytes` has where each
            ends; None: they are conversations, or it was not counted.
        reasons: how many bad documents were left out for each reason.
    """

    name: str
    key: str
    tokens: int
    documents: int
    skipped: int
    first_bad: str
    digest: str
    text_bytes: int | None = None
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CorpusMeta:
    """A folder of prepared tokens.

    Attributes:
        tokenizer: what was named as the tokenizer.
        tokenizer_fingerprint: of its file.
        vocab_size: the number of its tokens.
        end_token: what ends a document; None: nothing does.
        dtype: of a token.
        masked: whether `<part>.mask` says which tokens are to be learned.
        source: a digest of the names, sizes and times of the source files.
        settings: how documents were read.
        parts: the token files.
        fingerprint: of the content, all tokens.
        mask_token: the tokenizer's that stands for tokens to be filled in; None: it has none.
    """

    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    end_token: int | None
    dtype: np.dtype
    masked: bool
    source: str
    settings: str
    parts: tuple[TokenPart, ...]
    fingerprint: str
    mask_token: int | None = None

    @property
    def tokens(self) -> int:
        """The number of all tokens."""
        return sum(part.tokens for part in self.parts)

    @property
    def documents(self) -> int:
        """The number of all documents."""
        return sum(part.documents for part in self.parts)

    @property
    def text_bytes(self) -> int | None:
        """The length of all documents as UTF-8; None: it is not known of all."""
        sizes = [part.text_bytes for part in self.parts]
        return None if None in sizes else sum(filter(None, sizes))

    @property
    def skipped(self) -> int:
        """The number of all bad documents that were left out."""
        return sum(part.skipped for part in self.parts)


def write_meta(root: Path, meta: CorpusMeta) -> None:
    """Write `meta.json`, whole or not at all."""
    counts = {name: getattr(meta, name) for name in _COUNTS}
    tree = {"format": _FORMAT, **asdict(meta), "dtype": meta.dtype.name, **counts}
    write_whole(root / META, json.dumps(tree, indent=1) + "\n")


def read_meta(root: PurePath, source: str, access: FileAccess | None = None) -> CorpusMeta:
    """Read a folder's `meta.json`.

    Args:
        root: the folder.
        source: what the user named, as `dataset.path=…`.
        access: how its files are read; None: they are on the disk.

    Raises:
        InputError: it is damaged, or of another version.
    """
    try:
        tree: dict[str, Any] = json.loads((access or FileAccess()).whole(root / META))
        if tree.pop("format") != _FORMAT:
            raise ValueError("it was written by another version")
        for count in _COUNTS:
            tree.pop(count, None)
        parts = tuple(TokenPart(**part) for part in tree.pop("parts"))
        return CorpusMeta(**(tree | {"dtype": np.dtype(tree["dtype"]), "parts": parts}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{source}: {root / META} is damaged ({error}); run task=prepare_data again"
        ) from None


ENDINGS = (".bin", ".npy")
_HEADER = 2**14  # bytes of a .npy file that hold its header: NumPy reads none above 10,000
_REMEDY = "name a folder that task=prepare_data wrote, or .bin or .npy files of tokens"


@dataclass(frozen=True)
class TokenFile:
    """One file of tokens.

    Attributes:
        path: where it is.
        dtype: the type of a token.
        offset: the byte at which tokens begin.
        count: the number of tokens.
        ends: where the number of the token behind each document is, int64; None: not known.
        mask: a byte a token, 1 where it is to be learned, 0 where not; None: all are.
        text: where the text of each document ends, in bytes of UTF-8, int64; None: not known.
    """

    path: PurePath
    dtype: np.dtype
    offset: int
    count: int
    ends: PurePath | None = None
    mask: PurePath | None = None
    text: PurePath | None = None


@dataclass(frozen=True)
class Corpus:
    """Token files, one behind the other, and what the folder says of them if it is a prepared one.

    Attributes:
        source: what the user named, as `dataset.path=…`.
        files: the files, none of them empty.
        access: how they are read.
        meta: of a folder that `task=prepare_data` wrote.
        left_out: what is not read, in words (`NamedFiles.left_out`).
    """

    source: str
    files: tuple[TokenFile, ...]
    access: FileAccess
    meta: CorpusMeta | None = None
    left_out: str = ""

    @property
    def fingerprint(self) -> str:
        """A digest of the tokens: the folder's own, or one of what tells that files differ."""
        if self.meta is not None:
            return self.meta.fingerprint
        return self.access.fingerprint([file.path for file in self.files])

    @property
    def count(self) -> int:
        """The number of tokens."""
        return int(self.starts[-1])

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The number of the first token of each file, and of the one behind the last, int64."""
        return np.array([0, *itertools.accumulate(file.count for file in self.files)], np.int64)

    def place(self, position: int) -> tuple[TokenFile, int]:
        """Return the file that holds a token, and the token's number in it."""
        index = int(np.searchsorted(self.starts, position, "right")) - 1
        return self.files[index], position - int(self.starts[index])

    def tokens(self, start: int, count: int) -> np.ndarray:
        """Return tokens, int64 [count]."""
        pieces = [
            self._read(file.path, file.dtype, file.offset, first, number)
            for file, first, number, _ in self._ranges(start, count)
        ]
        return np.concatenate(pieces).astype(np.int64)

    def learned(self, start: int, count: int) -> np.ndarray:
        """Return which tokens are to be learned, bool [count]."""
        pieces = [
            np.ones(number, bool)
            if file.mask is None
            else self._read(file.mask, np.dtype(np.uint8), 0, first, number) != 0
            for file, first, number, _ in self._ranges(start, count)
        ]
        return np.concatenate(pieces)

    def text_bytes(self, start: int, count: int) -> float | None:
        """Return how long the text of a range of tokens is as UTF-8; None where it is not known.

        A document that is partly in the range counts by the share of its tokens.
        """
        total = 0.0
        for file, first, number, _ in self._ranges(start, count):
            if file.ends is None or file.text is None:
                return None
            ends, text = self.access.array(file.ends), self.access.array(file.text)
            if len(ends) != len(text):
                raise InputError(f"{file.text} is cut short; run task=prepare_data again")
            places = np.interp([first, first + number], [0, *ends], [0, *text])
            total += float(places[1] - places[0])
        return total

    def begins(self, start: int, tokens: np.ndarray, end_token: int | None) -> np.ndarray:
        """Return where documents begin in a range, bool as `tokens`; the first always does.

        Args:
            start: the range's first token.
            tokens: the tokens there.
            end_token: what ends a document in files without ends; None: nothing does.
        """
        found = np.zeros(len(tokens), bool)
        found[0] = True
        for file, first, number, at in self._ranges(start, len(tokens)):
            if first == 0:
                found[at] = True
            if file.ends is not None:
                ends = self.access.array(file.ends)
                low, high = np.searchsorted(ends, [first, first + number])
                inside = ends[low:high] - first
                found[at + inside[inside < number]] = True
            elif end_token is not None:
                ended = np.flatnonzero(tokens[at : at + number - 1] == end_token)
                found[at + ended + 1] = True
        return found

    def _ranges(self, start: int, count: int) -> Iterator[tuple[TokenFile, int, int, int]]:
        """Yield each file that a range touches, with its first token, their number and place."""
        index, at = int(np.searchsorted(self.starts, start, "right")) - 1, 0
        while at < count:
            file, first = self.files[index], start + at - int(self.starts[index])
            number = min(count - at, file.count - first)
            yield file, first, number, at
            at, index = at + number, index + 1

    def _read(
        self, path: PurePath, dtype: np.dtype, offset: int, first: int, number: int
    ) -> np.ndarray:
        size = number * dtype.itemsize
        content = self.access.read(path, offset + first * dtype.itemsize, size)
        if len(content) != size:
            raise InputError(
                f"{path} ends before token {first + number:,}: it was cut short while it was read"
            )
        return np.frombuffer(content, dtype)


def find_corpus(
    path: str, dtype: str = "auto", key: str = "dataset.path", options: Any = None
) -> Corpus:
    """Return the token files that `path` names, by name, from their sizes and headers alone.

    Args:
        path: a folder that `task=prepare_data` wrote, a .bin or .npy file, a folder of such files,
            or a glob; also in an object store.
        dtype: of .bin files, "uint16" or "uint32"; "auto": what the prepared folder that
            they are of says, or uint16, as nanoGPT writes them.
        key: the setting that names it.
        options: the settings of a path in an object store, a `TokenRows`.

    Raises:
        InputError: there are none, or one is not a token file.
    """
    access = access_to(path, options)
    source, root = f"{key}={path}", access.root(path)
    if access.size(root / META) is not None:
        return _prepared(source, root, access)
    found = access.named(source, path, with_ending(ENDINGS), _REMEDY)
    paths = found.paths
    if not paths:
        what = "holds no .bin or .npy file" if root in found.folders else "names no file"
        raise InputError(f"{source} {what}{found.left_out}; {_REMEDY}")
    if prepared := [folder for folder in found.folders if access.size(folder / META) is not None]:
        raise InputError(
            f"{source} holds the prepared corpus {prepared[0]}; name that, or several as the "
            "parts of dataset=mixture"
        )
    for file in paths:
        if file.suffix.lower() not in ENDINGS:
            raise InputError(f"{source}: {file} is not a token file; {_remedy_for(file)}")
    kind_in = functools.cache(lambda folder: read_meta(folder, source, access).dtype)
    files = [_plain(source, file, dtype, kind_in, access) for file in paths]
    if not sum(file.count for file in files):
        raise InputError(f"{source} holds no tokens ({paths[0]} is empty); {_REMEDY}")
    whole = tuple(file for file in files if file.count)
    return Corpus(source, whole, access, None, found.left_out)


def _remedy_for(file: Path) -> str:
    """Return what to do with a file that holds no tokens."""
    for format, endings in SUFFIXES.items():
        if file.suffix in endings:
            named = f"documents dataset.format={format}" if format == "text" else format
            return (
                f"make tokens of its documents with task=prepare_data dataset={named}, and name "
                "the folder that this writes"
            )
    return _REMEDY


def _prepared(source: str, root: PurePath, access: FileAccess) -> Corpus:
    meta = read_meta(root, source, access)
    files = []
    for part in meta.parts:
        file = root / f"{part.name}.bin"
        size = access.size(file)
        if size != part.tokens * meta.dtype.itemsize:
            found = "is missing" if size is None else f"holds {size:,} bytes"
            raise InputError(
                f"{source}: {file} {found}, and {META} says {part.tokens:,} tokens of "
                f"{meta.dtype}; run task=prepare_data again"
            )
        mask = root / f"{part.name}.mask" if meta.masked else None
        text = root / f"{part.name}.bytes" if part.text_bytes is not None else None
        ends = root / f"{part.name}.ends"
        if part.tokens:
            files.append(TokenFile(file, meta.dtype, 0, part.tokens, ends, mask, text))
    if not files:
        raise InputError(f"{source} holds no tokens; prepare a corpus with documents in it")
    return Corpus(source, tuple(files), access, meta)


def _plain(
    source: str,
    path: Path,
    dtype: str,
    kind_in: Callable[[PurePath], np.dtype[Any]],
    access: FileAccess,
) -> TokenFile:
    access.check_readable(source, path)
    size = access.size(path) or 0
    if path.suffix.lower() == ".npy":
        return _npy(source, path, dtype, access.read(path, 0, _HEADER), size)
    if dtype == "auto":
        beside = (path.with_suffix(".ends"), path.parent / META)
        is_part = all(access.size(file) is not None for file in beside)
        kind = kind_in(path.parent) if is_part else np.dtype("<u2")
    else:
        kind = np.dtype(dtype).newbyteorder("<")
    if size % kind.itemsize:
        raise InputError(
            f"{source}: {path} holds {size:,} bytes, which is not a whole number of {kind.name} "
            "tokens; it was cut short, or dataset.dtype is another"
        )
    return TokenFile(path, kind, 0, size // kind.itemsize)


def _npy(source: str, path: PurePath, dtype: str, begin: bytes, size: int) -> TokenFile:
    of = np.lib.format
    try:
        file = io.BytesIO(begin)
        first = of.read_magic(file) == (1, 0)
        shape, _, kind = (of.read_array_header_1_0 if first else of.read_array_header_2_0)(file)
    except Exception as error:  # of a garbled header, NumPy's parsers raise many
        why = str(error).partition("\n")[0]  # further lines say how to load it all the same
        raise InputError(f"{source}: {path} is not a whole .npy file ({why})") from None
    if len(shape) != 1 or kind.kind not in "iu":
        raise InputError(
            f"{source}: {path} holds {kind} {list(shape)}; tokens are integers in one dimension"
        )
    if dtype not in ("auto", kind.name):
        raise InputError(f"{source}: {path} holds {kind}, not dataset.dtype={dtype}; leave it out")
    if not 0 <= shape[0] * kind.itemsize <= size - file.tell():
        raise InputError(f"{source}: {path} is not a whole .npy file (it was cut short)")
    return TokenFile(path, kind, file.tell(), shape[0])
