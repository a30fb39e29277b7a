"""Documents in the files that people have: text, JSON lines, Parquet, Arrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from launcher.recipes.data.corpus.sources import SourcePiece, arrow_module
from launcher.recipes.data.file_access import FileAccess
from launcher.recipes.protocols import InputError

_WHOLE = "the file"


@dataclass(frozen=True)
class FoundDocument:
    """One document, or why there is none.

    Attributes:
        value: text, or messages; None if it is bad.
        place: where it is in the file, in words, such as "row 3"; of JSON lines its first byte.
        why: what is wrong with it.
        lost: how many documents there would be, if it is bad.
    """

    value: Any
    place: str | int
    why: str = ""
    lost: int = 1

    def problem(self, path: PurePath) -> str:
        """Return the file, the place in it and what is wrong there, in a line."""
        # Lines are counted only here: those before a piece are read for it.
        place = f"line {_line(path, self.place)}" if isinstance(self.place, int) else self.place
        return f"{path}: {self.why}" if place == _WHOLE else f"{path}, {place}: {self.why}"

    def refusal(self, path: PurePath) -> InputError:
        """Return the error that names it and says what to do."""
        problem = self.problem(path).rstrip(".")  # a library's text may end in one
        return InputError(f"{problem}; fix it, or leave bad documents out with dataset.bad=skip")


def documents_in(
    piece: SourcePiece, format: str, field: str, access: FileAccess
) -> Iterator[FoundDocument]:
    """Yield the documents of a piece, bad ones too.

    Args:
        piece: the piece.
        format: text, jsonl, parquet or arrow.
        field: the name of the text, or of the messages, in a row.
        access: how the file is read.

    Raises:
        OSError: the file cannot be read.
    """
    if format == "parquet":
        return _parquet(piece, field, access)
    return _READERS[format](piece, field)


def _text(piece: SourcePiece, field: str) -> Iterator[FoundDocument]:
    content = Path(piece.path).read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        yield FoundDocument(None, f"byte {error.start:,}", "it is not UTF-8")
        return
    yield (FoundDocument(text, _WHOLE) if text else FoundDocument(None, _WHOLE, "it is empty"))


def _jsonl(piece: SourcePiece, field: str) -> Iterator[FoundDocument]:
    with open(piece.path, "rb") as file:
        if piece.start == piece.stop:
            yield FoundDocument(None, _WHOLE, "it is empty")
        if piece.start:  # a line belongs to the piece in which it begins
            file.seek(piece.start - 1)
            file.readline()
        while (start := file.tell()) < piece.stop:
            line = file.readline()
            if not line.strip():
                continue
            try:
                yield FoundDocument(_row(json.loads(line), field), start)
            except RecursionError:
                yield FoundDocument(None, start, "it is nested too deeply")
            except ValueError as error:
                yield FoundDocument(None, start, str(error))


def _lacks(kind: str, field: str, names: Iterable[str]) -> str:
    listed = ", ".join(names).encode(errors="backslashreplace").decode() or "none"
    return f"it has no {kind} {field!r} (dataset.field), it has {listed}"


def _row(row: Any, field: str) -> Any:
    if not isinstance(row, dict):
        raise ValueError("it is not a table of fields")
    if field not in row:
        raise ValueError(_lacks("field", field, row))
    return _value(row[field], field)


def _value(value: Any, field: str) -> Any:
    try:
        return checked_value(value)
    except ValueError as error:
        raise ValueError(f"{field!r} {error}") from None


def _line(path: PurePath, offset: int) -> int:
    with open(path, "rb") as file:
        left, count = offset, 1
        while left and (block := file.read(min(left, 2**20))):
            count, left = count + block.count(b"\n"), left - len(block)
    return count


def _parquet(piece: SourcePiece, field: str, access: FileAccess) -> Iterator[FoundDocument]:
    parquet = arrow_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(access.opened(piece.path))
    except InputError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's errors are one or the other
        yield FoundDocument(None, _WHOLE, _one_line(error))
        return
    count = file.num_row_groups
    groups = range(piece.start, piece.stop if piece.stop >= 0 else count)
    rows = [file.metadata.row_group(group).num_rows for group in range(count)]
    if field not in file.schema_arrow.names:
        why = _lacks("column", field, file.schema_arrow.names)
        yield FoundDocument(None, _WHOLE, why, lost=sum(rows[groups.start : groups.stop]))
        return
    for group in groups:
        row, stop = sum(rows[:group]), sum(rows[: group + 1])
        try:
            batches = file.iter_batches(1024, row_groups=[group], columns=[field])
            for found in _rows((batch.column(0) for batch in batches), field, row):
                yield found
                row += 1
        except InputError:
            raise
        except (OSError, ValueError) as error:
            place = f"row group {group}, rows {row:,} to {stop - 1:,}"
            yield FoundDocument(None, place, _one_line(error), lost=stop - row)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _arrow_file(piece: SourcePiece, field: str) -> Iterator[FoundDocument]:
    ipc, arrow = arrow_module("pyarrow.ipc"), arrow_module("pyarrow")
    row = 0
    try:
        with arrow.memory_map(str(piece.path)) as source:
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
            for found in _rows((batch.column(index) for batch in batches), field, 0):
                yield found
                row += 1
    except (OSError, ValueError) as error:
        place = f"all from row {row:,} on" if row else _WHOLE
        yield FoundDocument(None, place, _one_line(error))


def _rows(columns: Iterator[Any], field: str, row: int) -> Iterator[FoundDocument]:
    for column in columns:
        for cell in column:
            place = f"row {row:,}"
            try:
                yield FoundDocument(_value(cell.as_py(), field), place)
            except UnicodeDecodeError:
                yield FoundDocument(None, place, f"{field!r} is not UTF-8")
            except ValueError as error:
                yield FoundDocument(None, place, str(error))
            row += 1


_READERS: dict[str, Callable[[SourcePiece, str], Iterator[FoundDocument]]] = {
    "text": _text,
    "jsonl": _jsonl,
    "arrow": _arrow_file,
}


def checked_value(value: Any) -> Any:
    """Return a document's text, or its messages, each with its content as one text.

    The content of a message may be a list of parts, such as `{"type": "text", "text": "hello"}`;
    they are joined.

    Raises:
        ValueError: it is not a document; the message continues a sentence that begins with the
            field.
    """
    if value is None:
        raise ValueError("is null")
    if not isinstance(value, str | list):
        raise ValueError(f"is of type {type(value).__name__}, neither text nor a list of messages")
    if not value:
        raise ValueError("is empty")
    if isinstance(value, str):
        check_text(value)
        return value
    return [_message(message, f"in message {number}") for number, message in enumerate(value, 1)]


def check_text(text: str) -> None:
    """Raise ValueError if a text cannot be encoded as UTF-8: it has half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(
            f"has half of a surrogate pair ({half}) at character {error.start:,}"
        ) from None


def _message(message: Any, where: str) -> Any:
    """Return a message with its content as one text, without what is null in it.

    A message that calls tools may have no content.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"has no role that is text {where}")
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return message
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"has no content that is text {where}")
    for text in (message["role"], content):
        try:
            check_text(text)
        except ValueError as error:
            raise ValueError(f"{error} {where}") from None
    return {**message, "content": content}


def _part(part: Any, where: str) -> str:
    """Return the text of a part of a message's content."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise ValueError(f"has a part of type {kind!r} {where}; only text can be learned")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"has a part without text {where}")
    return text
