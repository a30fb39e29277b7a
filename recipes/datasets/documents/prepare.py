"""Turn a corpus into a folder of token files, in parallel; a killed run resumes where it was.

The folder holds, for each part of the source: `<part>.bin`, its tokens; `<part>.ends`, where its
documents end; `<part>.bytes`, where their text ends; `<part>.mask` of conversations; and
`<part>.json`, which is written last and says what the part was made of. `meta.json` is written when
all parts are there.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar

import numpy as np

from launcher.base import FULL, hub, write_whole
from launcher.recipes.data.corpus.chat import Encoded, chat_encoder
from launcher.recipes.data.corpus.documents import FoundDocument, documents_in
from launcher.recipes.data.corpus.files import META, CorpusMeta, TokenPart, read_meta, write_meta
from launcher.recipes.data.corpus.sources import SourcePiece, find_sources, pieces_of
from launcher.recipes.data.corpus.tokenizers import (
    load_tokenizer,
    settings_fingerprint,
    tokenizer_fingerprint,
)
from launcher.recipes.data.file_access import FileAccess
from launcher.recipes.data.files import NamedFiles
from launcher.recipes.data.stored_files import access_to
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.protocols import InputError, Tokenizer

_AT_ONCE = 256  # documents that are tokenised in one call
_ENDINGS = (".bin", ".ends", ".bytes", ".mask", ".json")
_END = "<|endoftext|>"

T = TypeVar("T")

_log = logging.getLogger(__name__)


class EncodedDocument(NamedTuple):
    """A document's tokens.

    Attributes:
        tokens: with the one that ends it, if the tokenizer has one.
        text_bytes: how long the text is as UTF-8; None: it is a conversation.
        learned: which tokens are to be learned; None: all.
    """

    tokens: np.ndarray
    text_bytes: int | None
    learned: np.ndarray | None = None


class BadDocuments:
    """Refuses bad documents, or counts them by reasons, as `dataset.bad` says.

    Args:
        refuse: whether the first one is an error.
    """

    def __init__(self, refuse: bool) -> None:
        self._refuse, self.reasons, self.first = refuse, Counter[str](), ""

    def add(self, path: PurePath, found: FoundDocument) -> None:
        """Count a bad document; raises InputError if they are refused."""
        if self._refuse:
            raise found.refusal(path)
        self.reasons[re.sub(r"\d[\d,]*", "…", found.why)] += found.lost
        self.first = self.first or found.problem(path)


_tokenizer = functools.lru_cache(1)(load_tokenizer)


@functools.lru_cache(1)
def _chat(tokenizer: str, template: str | None, when: float) -> Callable[[Any], Encoded]:
    return chat_encoder(_tokenizer(tokenizer), template, when)


def encoded_documents(
    options: Documents, piece: SourcePiece, bad: BadDocuments
) -> Iterator[EncodedDocument]:
    """Yield the documents of a piece as tokens.

    Raises:
        InputError: one is bad, and such are refused.
        OSError: the file cannot be read.
    """
    tokenizer, access = _tokenizer(options.tokenizer), access_to(options.path, options)
    # A preparation that is resumed elsewhere, or another day, is to have the same dates.
    when = access.modified(piece.path)
    waiting: list[FoundDocument] = []

    def flush() -> Iterator[EncodedDocument]:
        made = tokenizer.encode([one.value for one in waiting])
        for one, tokens in zip(waiting, made, strict=True):
            if len(tokens):
                yield EncodedDocument(tokenizer.document(tokens), len(one.value.encode()))
            else:
                bad.add(piece.path, replace(one, why="it has no token"))
        waiting.clear()

    for found in documents_in(piece, options.format, options.field, access):
        if found.value is None:
            bad.add(piece.path, found)
        elif isinstance(found.value, str):
            waiting.append(found)
            if len(waiting) == _AT_ONCE:
                yield from flush()
        else:
            yield from flush()
            encode = _chat(options.tokenizer, options.chat_template, when)
            try:
                tokens, learned = encode(found.value)
            except ValueError as error:
                bad.add(piece.path, replace(found, why=str(error)))
                continue
            whole = tokenizer.ended(tokens)
            # The end of the last answer is to be learned as well.
            is_ours = found.value[-1]["role"] == "assistant"
            behind = np.full(len(whole) - len(tokens), is_ours)
            yield EncodedDocument(whole, None, np.concatenate([learned, behind]))
    yield from flush()


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


def _folder(options: Documents) -> Path:
    return Path(options.folder).expanduser()


def _settings(options: Documents) -> str:
    """Return a digest of how documents are read and tokenised, but for the source's files."""
    template = options.chat_template
    if template is not None and Path(template).expanduser().is_file():
        template = Path(template).expanduser().read_text()
    name = options.tokenizer
    tokenizer = [tokenizer_fingerprint(name), settings_fingerprint(name)]
    return _digest([options.format, options.field, template, options.bad, tokenizer])


def sources_of(options: Documents) -> tuple[FileAccess, NamedFiles]:
    """Return the source files, and what reads them; raises InputError if there are none."""
    access = access_to(options.path, options)
    return access, find_sources(options.path, options.pattern, options.format, access)


def _source(options: Documents) -> str:
    """Return a digest of the source files' names, sizes and times; raises InputError.

    A commit's files never change, and need not be here.
    """
    if hub.is_name(options.path):
        return _digest([options.path, options.pattern])
    access, found = sources_of(options)
    return _digest([access.stamp(path) for path in found.paths])


def prepare_corpus(
    options: Documents, processes: int, progress: Callable[[float], None] = lambda share: None
) -> CorpusMeta:
    """Write the missing token files of the folder, and return its metadata.

    Args:
        options: the documents, their tokenizer and the folder to write.
        processes: how many processes read and tokenise; 1: this one alone.
        progress: takes the share done, 0 to 1.

    Raises:
        InputError: the source or tokenizer cannot be used, or a document is bad.
        OSError: a file cannot be read or written.
    """
    tokenizer, folder = load_tokenizer(options.tokenizer), _folder(options)
    source, settings, dtype = _source(options), _settings(options), _dtype(tokenizer)
    access, found = sources_of(options)
    groups, stamp = pieces_of(found.paths, options.format, access), access.stamp
    keys = {
        f"{index:05}": _digest([settings, [[stamp(p.path), p.start, p.stop] for p in group]])
        for index, group in enumerate(groups)
    }
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(options):
        done = {name: part for name, key in keys.items() if (part := _finished(folder / name, key))}
        if len(done) == len(keys) and (meta := up_to_date(options)):
            return meta
        if (folder / META).exists():
            _log.warning(f"the tokens in {options.folder} are replaced: source or settings differ")
        (folder / META).unlink(missing_ok=True)  # no mixture of old and new is ever complete
        sizes = {name: sum(p.size for p in group) for name, group in zip(keys, groups, strict=True)}
        todo = {
            name: (options, name, keys[name], tuple(group), dtype)
            for name, group in zip(keys, groups, strict=True)
            if name not in done
        }
        for part in results_of(_make, list(todo.values()), processes):
            done[part.name] = part
            progress(sum(sizes[name] for name in done) / max(1, sum(sizes.values())))
        parts = tuple(done[name] for name in keys)
        _delete_others(folder, keys)
        meta = CorpusMeta(
            tokenizer=options.tokenizer,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            end_token=tokenizer.end_token,
            dtype=dtype,
            masked=any((folder / f"{name}.mask").is_file() for name in keys),
            source=source,
            settings=settings,
            parts=parts,
            fingerprint=_digest([dtype.name, *[part.digest for part in parts]]),
            mask_token=tokenizer.mask_token,
        )
        _check_skipped(options, meta)
        if not meta.tokens:
            raise InputError(f"dataset.path={options.path} holds no document")
        write_meta(folder, meta)
        return meta


def _check_skipped(options: Documents, meta: CorpusMeta) -> None:
    """Raise InputError if most documents are bad: then what reads them is wrong, not they."""
    if meta.skipped <= meta.documents:
        return
    reasons = sum((Counter(part.reasons) for part in meta.parts), Counter[str]())
    why, count = reasons.most_common(1)[0]
    raise InputError(
        f"dataset.bad=skip would leave out {meta.skipped:,} of {meta.skipped + meta.documents:,} "
        f"documents of dataset.path={options.path}, {count:,} of them because: {why}; fix them, or "
        "what reads them (dataset.field, dataset.chat_template); dataset.bad=refuse names the first"
    )


def up_to_date(options: Documents) -> CorpusMeta | None:
    """Return what the folder holds if it was made of this very source and settings, else None.

    Raises:
        InputError: the folder is damaged, or the source or tokenizer cannot be used.
    """
    folder = _folder(options)
    if not (folder / META).is_file():
        return None
    meta = read_meta(folder, f"dataset.tokens={options.folder}")
    same = meta.source == _source(options) and meta.settings == _settings(options)
    return meta if same else None


def _make(
    options: Documents, name: str, key: str, group: Sequence[SourcePiece], dtype: np.dtype
) -> TokenPart:
    """Write the files of one part."""
    base = _folder(options) / name
    digest, count, bad = hashlib.sha256(), 0, BadDocuments(refuse=options.bad == "refuse")
    ends: list[int] = []
    sizes: list[int | None] = []
    masks: list[np.ndarray] = []
    is_masked = False
    partial = base.with_suffix(".partial")
    with _naming(partial), open(partial, "wb") as file:
        for piece in group:
            for tokens, text_bytes, learned in encoded_documents(options, piece, bad):
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
    left_out = bad.reasons.total(), bad.first, digest.hexdigest(), total
    part = TokenPart(name, key, count, len(ends), *left_out, dict(bad.reasons))
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


def _finished(base: Path, key: str) -> TokenPart | None:
    """Return an existing part that was made of the same; None if there is none."""
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
def _locked(options: Documents) -> Iterator[None]:
    with open(_folder(options) / ".lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info(f"{options.folder} is being written by another process; waiting for that")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def train_tokenizer(options: Documents, vocab_size: int, path: Path) -> int:
    """Write a byte-level BPE, as GPT-2's, as a `tokenizer.json`, and return its size.

    (Sennrich et al., 2016, "Neural Machine Translation of Rare Words with Subword Units"; Radford
    et al., 2019, for bytes.) `<|endoftext|>` is one of its tokens.

    Args:
        options: the documents, by the same settings as for preparing them.
        vocab_size: the most tokens.
        path: the file to write.

    Raises:
        InputError: the documents cannot be used.
        OSError: a file cannot be read or written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_texts(options), trainer)
    write_whole(path, made.to_str(pretty=True))
    return int(made.get_vocab_size())


def _texts(options: Documents) -> Iterator[str]:
    access, sources = sources_of(options)
    for group in pieces_of(sources.paths, options.format, access):
        for piece in group:
            for found in documents_in(piece, options.format, options.field, access):
                if isinstance(found.value, str):
                    yield found.value
                elif found.value is not None:
                    yield from (message.get("content", "") for message in found.value)
                elif options.bad == "refuse":
                    raise found.refusal(piece.path)
