"""Turn a corpus into a folder of token files, in parallel; a killed run resumes where it was.

The folder holds, for each part of the source: `<part>.bin`, its tokens; `<part>.ends`, where its
documents end; `<part>.bytes`, where their text ends; `<part>.mask` of conversations; and
`<part>.json`, which is written last and says what the part was made of. `meta.json` is written when
all parts are there.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from launcher.base import FULL, write_whole
from launcher.recipes import InputError
from launcher.recipes.data.corpus.encoded import BadDocuments, encoded_documents
from launcher.recipes.data.corpus.meta import META, CorpusMeta, TokenPart, read_meta, write_meta
from launcher.recipes.data.corpus.sources import SourcePiece, find_sources, pieces_of, stamp_of
from launcher.recipes.data.corpus.tokenizers import Tokenizer, load_tokenizer, tokenizer_fingerprint

T = TypeVar("T")


def results_of(
    function: Callable[..., T], given: Sequence[tuple[Any, ...]], processes: int
) -> Iterator[T]:
    """Yield what a function returns for each of the arguments, in the order in which it does.

    Args:
        function: one of a module, called in a process of its own unless there is only one.
        given: the arguments of each call.
        processes: how many processes, at most.
    """
    if processes == 1 or len(given) <= 1:
        yield from (function(*each) for each in given)
        return
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(min(processes, len(given)), context, _begin, (theirs,))
    try:
        for future in as_completed([pool.submit(function, *each) for each in given]):
            yield future.result()
    except KeyboardInterrupt:
        ours.close()  # nobody waits for what is half done
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        theirs.close()
        ours.close()


def _begin(parents: Connection) -> None:
    """Prepare a process of the pool: Ctrl-C is the parent's.

    Args:
        parents: ends when the parent does, or no longer wants anything.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism

    def watch() -> None:
        with suppress(EOFError, OSError):
            parents.recv_bytes()
        signal.raise_signal(signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


_log = logging.getLogger(__name__)

_ENDINGS = (".bin", ".ends", ".bytes", ".mask", ".json")


@dataclass(frozen=True)
class Preparation:
    """What is to be prepared.

    Attributes:
        path: the source: a file, a folder or a glob.
        pattern: which files of a folder; None: those with an ending of the format.
        format: text, jsonl, parquet or arrow.
        field: the name of the text, or of the messages, in a row.
        tokenizer: a tokenizer's file or folder, or bytes.
        chat_template: how messages become text; None: as the tokenizer says.
        bad: what follows a bad document: refuse or skip.
        tokens: the folder to write.
    """

    path: str
    pattern: str | None
    format: str
    field: str
    tokenizer: str
    chat_template: str | None
    bad: str
    tokens: str

    @property
    def folder(self) -> Path:
        """The folder to write."""
        return Path(self.tokens).expanduser()

    def settings(self) -> str:
        """Return a digest of how documents are read and tokenised, but for the source's files."""
        template = self.chat_template
        if template is not None and Path(template).expanduser().is_file():
            template = Path(template).expanduser().read_text()
        return _digest(
            [
                *(self.format, self.field, template, self.bad),
                tokenizer_fingerprint(self.tokenizer),
            ]
        )

    def source(self) -> str:
        """Return a digest of the source files' names, sizes and times; raises InputError."""
        return _digest([stamp_of(p) for p in find_sources(self.path, self.pattern, self.format)])


def prepare_corpus(
    work: Preparation, processes: int, progress: Callable[[float], None] = lambda share: None
) -> CorpusMeta:
    """Write the missing token files of the folder, and return its metadata.

    Args:
        work: what is to be prepared.
        processes: how many processes read and tokenise; 1: this one alone.
        progress: takes the share done, 0 to 1.

    Raises:
        InputError: the source or tokenizer cannot be used, or a document is bad.
        OSError: a file cannot be read or written.
    """
    tokenizer, source, settings = load_tokenizer(work.tokenizer), work.source(), work.settings()
    groups = pieces_of(find_sources(work.path, work.pattern, work.format), work.format)
    keys = {
        f"{index:05}": _digest([settings, [[stamp_of(p.path), p.start, p.stop] for p in group]])
        for index, group in enumerate(groups)
    }
    work.folder.mkdir(parents=True, exist_ok=True)
    with _locked(work):
        done = {name: part for name, key in keys.items() if (part := _finished(work, name, key))}
        if len(done) == len(keys) and (meta := up_to_date(work)):
            return meta
        (work.folder / META).unlink(missing_ok=True)  # no mixture of old and new is ever complete
        sizes = {name: sum(p.size for p in group) for name, group in zip(keys, groups, strict=True)}
        todo = {
            name: (work, name, keys[name], tuple(group), _dtype(tokenizer))
            for name, group in zip(keys, groups, strict=True)
            if name not in done
        }
        for part in results_of(_make, list(todo.values()), processes):
            done[part.name] = part
            progress(sum(sizes[name] for name in done) / max(1, sum(sizes.values())))
        parts = tuple(done[name] for name in keys)
        _delete_others(work.folder, keys)
        meta = _meta(work, tokenizer, parts, source, settings)
        if not meta.tokens:
            (bad,) = [part.first_bad for part in parts if part.first_bad][:1] or [""]
            raise InputError(f"dataset.path={work.path} holds no document{bad and f' ({bad})'}")
        write_meta(work.folder, meta)
        return meta


def up_to_date(work: Preparation) -> CorpusMeta | None:
    """Return what the folder holds if it was made of this very source and settings, else None.

    Raises:
        InputError: the folder is damaged, or the source or tokenizer cannot be used.
    """
    if not (work.folder / META).is_file():
        return None
    meta = read_meta(work.folder, f"dataset.tokens={work.tokens}")
    same = meta.source == work.source() and meta.settings == work.settings()
    return meta if same else None


def _meta(
    work: Preparation,
    tokenizer: Tokenizer,
    parts: tuple[TokenPart, ...],
    source: str,
    settings: str,
) -> CorpusMeta:
    return CorpusMeta(
        tokenizer=work.tokenizer,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_token=tokenizer.end_token,
        dtype=_dtype(tokenizer),
        masked=any((work.folder / f"{part.name}.mask").is_file() for part in parts),
        source=source,
        settings=settings,
        parts=parts,
        fingerprint=_digest([_dtype(tokenizer).name, *[part.digest for part in parts]]),
        mask_token=tokenizer.mask_token,
    )


def _make(
    work: Preparation, name: str, key: str, group: Sequence[SourcePiece], dtype: np.dtype
) -> TokenPart:
    """Write the files of one part."""
    base = work.folder / name
    digest, count, bad = hashlib.sha256(), 0, BadDocuments(refuse=work.bad == "refuse")
    ends: list[int] = []
    sizes: list[int | None] = []
    masks: list[np.ndarray] = []
    is_masked = False
    partial = base.with_suffix(".partial")
    with _naming(partial), open(partial, "wb") as file:
        for piece in group:
            for tokens, text_bytes, learned in encoded_documents(work, piece, bad):
                content = tokens.astype(dtype).tobytes()
                file.write(content)
                digest.update(content)
                count += len(tokens)
                ends.append(count)
                sizes.append(text_bytes)
                is_masked = is_masked or learned is not None
                masks.append(np.ones(len(tokens), np.uint8) if learned is None else learned)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, base.with_suffix(".bin"))
    write_whole(base.with_suffix(".ends"), np.array(ends, np.int64).tobytes())
    for ending in (".mask", ".bytes"):
        base.with_suffix(ending).unlink(missing_ok=True)
    text = list(itertools.accumulate(size for size in sizes if size is not None))
    if is_masked:
        mask = np.concatenate(masks).astype(np.uint8).tobytes()
        digest.update(mask)
        write_whole(base.with_suffix(".mask"), mask)
    else:
        write_whole(base.with_suffix(".bytes"), np.array(text, np.int64).tobytes())
    total = None if is_masked else sum(text[-1:])
    part = TokenPart(name, key, count, len(ends), bad.count, bad.first, digest.hexdigest(), total)
    write_whole(base.with_suffix(".json"), json.dumps(asdict(part)))
    return part


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have the error of a disk that is full name the file."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            error.filename = str(path)
        raise


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def _finished(work: Preparation, name: str, key: str) -> TokenPart | None:
    """Return an existing part that was made of the same; None if there is none."""
    base = work.folder / name
    try:
        part = TokenPart(**json.loads(base.with_suffix(".json").read_text()))
        size = base.with_suffix(".ends").stat().st_size
        has_sizes = part.text_bytes is not None
        sizes = base.with_suffix(".bytes").stat().st_size if has_sizes else size
        bytes_each = base.with_suffix(".bin").stat().st_size / max(part.tokens, 1)
    except (OSError, ValueError, TypeError):
        return None
    is_whole = size == sizes == 8 * part.documents and (bytes_each in (2, 4) or not part.tokens)
    return part if part.key == key and is_whole else None


def _delete_others(folder: Path, names: Any) -> None:
    """Delete the parts of a source that has become smaller."""
    for path in folder.iterdir():
        if path.suffix in _ENDINGS and path.name != META and path.stem not in names:
            path.unlink()


@contextmanager
def _locked(work: Preparation) -> Iterator[None]:
    with open(work.folder / ".lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info(f"{work.tokens} is being written by another process; waiting for that")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
