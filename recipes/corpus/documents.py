"""Documents in the files that people have: text, JSON lines, Parquet, Arrow.

Files are cut into pieces that can be read apart: ranges of bytes or of row groups.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from launcher.missing_path import missing_path
from recipes import InputError

PIECE = 2**24  # bytes of source that are read as one
SUFFIXES = {
    "text": (".txt",),
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}


class SourcePiece(NamedTuple):
    """A part of one file.

    Attributes:
        path: the file.
        start: the first byte, or row group.
        stop: the byte, or row group, behind the last.
        size: its bytes, about.
    """

    path: str
    start: int
    stop: int
    size: int


class FoundDocument(NamedTuple):
    """One document, or why there is none.

    Attributes:
        value: text, or messages; None if it is bad.
        place: where it is in the file, such as "line 3".
        why: what is wrong with it.
    """

    value: Any
    place: str
    why: str = ""


@dataclass(frozen=True)
class Reading:
    """How documents are read.

    Attributes:
        format: text, jsonl, parquet or arrow.
        field: the name of the text, or of the messages, in a row.
    """

    format: str
    field: str

    def documents(self, piece: SourcePiece) -> Iterator[FoundDocument]:
        """Yield the documents of a piece, bad ones too.

        Raises:
            OSError: the file cannot be read.
        """
        return _READERS[self.format](piece, self.field)


def find_sources(path: str, pattern: str | None, format: str) -> list[Path]:
    """Return the source files: one file, those that a glob fits, or those below a folder, by name.

    Args:
        path: what `dataset.path` names.
        pattern: which files of a folder; None: those with an ending of the format.
        format: text, jsonl, parquet or arrow.

    Raises:
        InputError: there are none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if root.is_dir():
        endings = SUFFIXES[format]
        found = root.glob(pattern) if pattern else root.rglob("*")
        paths = [p for p in found if p.is_file() and (pattern or p.suffix in endings)]
    elif glob.has_magic(path):
        paths = [Path(p) for p in glob.glob(str(root), recursive=True) if Path(p).is_file()]
    else:
        raise InputError(
            f"dataset.path={path} {missing_path(root)}; name a file, a folder or a glob"
        )
    if not paths:
        wanted = pattern or " or ".join(f"*{ending}" for ending in SUFFIXES[format])
        raise InputError(f"dataset.path={path} holds no file that fits {wanted}; name another")
    return sorted(paths)


def pieces_of(paths: list[Path], format: str, size: int = PIECE) -> list[list[SourcePiece]]:
    """Return groups of pieces of about `size` bytes, in the order of the files."""
    groups: list[list[SourcePiece]] = [[]]
    for path in paths:
        for piece in _cut(path, format, size):
            if groups[-1] and sum(one.size for one in groups[-1]) + piece.size > size:
                groups.append([])
            groups[-1].append(piece)
    return groups


def _cut(path: Path, format: str, size: int) -> Iterator[SourcePiece]:
    whole = path.stat().st_size
    if format == "jsonl":
        for start in range(0, max(whole, 1), size):
            stop = min(start + size, whole)
            yield SourcePiece(str(path), start, stop, stop - start)
        return
    count = 1
    if format == "parquet":
        try:
            count = _arrow("pyarrow.parquet").ParquetFile(path).num_row_groups
        except (OSError, ValueError):
            count = 0  # damaged: said when it is read
    if count <= 1:
        yield SourcePiece(str(path), 0, -1, whole)
        return
    for group in range(count):
        yield SourcePiece(str(path), group, group + 1, whole // count)


def _text(piece: SourcePiece, field: str) -> Iterator[FoundDocument]:
    content = Path(piece.path).read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        yield FoundDocument(None, f"byte {error.start:,}", "it is not UTF-8")
        return
    yield (
        FoundDocument(text, "the file") if text else FoundDocument(None, "the file", "it is empty")
    )


def _jsonl(piece: SourcePiece, field: str) -> Iterator[FoundDocument]:
    with open(piece.path, "rb") as file:
        if piece.start == piece.stop:
            yield FoundDocument(None, "the file", "it is empty")
        if piece.start:  # a line belongs to the piece in which it begins
            file.seek(piece.start - 1)
            file.readline()
        while (start := file.tell()) < piece.stop:
            line = file.readline()
            if not line.strip():
                continue
            try:
                value = _row(json.loads(line), field)
            except ValueError as error:
                yield FoundDocument(None, f"line {_line(piece.path, start)}", str(error))
                continue
            yield FoundDocument(value, f"byte {start:,}")


def _lacks(kind: str, field: str, names: Iterable[str]) -> str:
    return f"it has no {kind} {field!r} (dataset.field), it has {', '.join(names) or 'none'}"


def _row(row: Any, field: str) -> Any:
    if not isinstance(row, dict):
        raise ValueError("it is not a table of fields")
    if field not in row:
        raise ValueError(_lacks("field", field, map(str, row)))
    if problem := _problem(row[field]):
        raise ValueError(f"{field!r} {problem}")
    return row[field]


def _problem(value: Any) -> str:
    if value is None:
        return "is null"
    if not isinstance(value, str | list):
        return f"is of type {type(value).__name__}, neither text nor a list of messages"
    return "" if value else "is empty"


def _line(path: str, offset: int) -> int:
    with open(path, "rb") as file:
        left, count = offset, 1
        while left and (block := file.read(min(left, 2**20))):
            count, left = count + block.count(b"\n"), left - len(block)
    return count


def _parquet(piece: SourcePiece, field: str) -> Iterator[FoundDocument]:
    parquet = _arrow("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(piece.path)
        names = file.schema_arrow.names
        if field not in names:
            raise ValueError(_lacks("column", field, names))
        groups = range(piece.start, piece.stop if piece.stop >= 0 else file.num_row_groups)
        first = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
        batches = file.iter_batches(1024, row_groups=list(groups), columns=[field])
        yield from _rows((batch.column(0) for batch in batches), field, first)
    except (OSError, ValueError) as error:  # pyarrow's errors are one or the other
        yield FoundDocument(None, "the file", " ".join(str(error).split()))


def _arrow_file(piece: SourcePiece, field: str) -> Iterator[FoundDocument]:
    ipc, arrow = _arrow("pyarrow.ipc"), _arrow("pyarrow")
    try:
        with arrow.memory_map(piece.path) as source:
            try:
                reader = ipc.open_stream(source)
                batches = iter(reader)
            except arrow.ArrowInvalid:
                source.seek(0)
                reader = ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            names = reader.schema.names
            if field not in names:
                raise ValueError(_lacks("column", field, names))
            index = names.index(field)
            yield from _rows((batch.column(index) for batch in batches), field, 0)
    except (OSError, ValueError) as error:
        yield FoundDocument(None, "the file", " ".join(str(error).split()))


def _rows(columns: Iterator[Any], field: str, row: int) -> Iterator[FoundDocument]:
    for column in columns:
        for value in column.to_pylist():
            problem = _problem(value)
            place = f"row {row:,}"
            yield (
                FoundDocument(None, place, f"{field!r} {problem}")
                if problem
                else FoundDocument(value, place)
            )
            row += 1


def _arrow(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise InputError(
            "dataset=parquet and dataset=arrow need the package pyarrow; "
            "pip install 'launcher[data]'"
        ) from None


def stamp_of(path: str | Path) -> str:
    """Return what tells that a file has changed: its name, size and time, wherever it lies."""
    status = os.stat(path)
    return f"{Path(path).name} {status.st_size} {status.st_mtime_ns}"


_READERS: dict[str, Callable[[SourcePiece, str], Iterator[FoundDocument]]] = {
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "arrow": _arrow_file,
}
