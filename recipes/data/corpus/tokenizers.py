"""Tokenizers that `dataset.tokenizer` names: Hugging Face's, tiktoken's, or bytes."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher.base import hub, lacking, missing_path
from launcher.recipes.data.files import local_path
from launcher.recipes.protocols import InputError, Tokenizer

BYTES = "bytes"
_END_OF_BYTES = 256
_JSON, _MODEL, _TEMPLATE = "tokenizer.json", "tokenizer.model", "chat_template.jinja"
# The roles of special tokens, in the order in which `transformers` adds them.
_ROLES = [f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
# Of sentencepiece: kinds of pieces and of models; where a model has special tokens, and by default.
_CONTROL, _USERS, _UNIGRAM = 3, 4, 1
_SPM_ROLES = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2)}
# Special tokens that a tokenizer's folder may not name: a mask, and the end of a document.
_MASKS = ("[MASK]", "<mask>")
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>")
# tiktoken's files hold ranks alone. Their number shows which pattern cuts the text, and which token
# <|endoftext|> is.
_RANKS = {50256: ("r50k", 50256), 100256: ("cl100k", 100257), 199998: ("o200k", 199999)}
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CUTS = {
    "r50k": (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"),
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k": (
        f"{_WORD}{_UPPER}*{_LOWER}+{_SHORT}|{_WORD}{_UPPER}+{_LOWER}*{_SHORT}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def tokenizer_fingerprint(name: str) -> str:
    """Return a digest of the tokenizer that `name` names, by its file and without loading it."""
    if name == BYTES:
        return BYTES
    return hashlib.sha256(_file(name).read_bytes()).hexdigest()[:32]


def settings_fingerprint(name: str) -> str:
    """Return a digest of what the files beside a tokenizer say: of its tokens and templates."""
    if name == BYTES:
        return ""
    return hashlib.sha256(json.dumps(_settings(_file(name).parent)).encode()).hexdigest()[:32]


def plain_bytes() -> Tokenizer:
    """Return what text read as bytes has for a tokenizer: nothing ends a document."""
    return _bytes()._replace(vocab_size=_END_OF_BYTES, end_token=None)


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that `name` names.

    Args:
        name: `bytes`; a `tokenizer.json` or sentencepiece's `tokenizer.model`, or a folder with
            one of them; or a `.tiktoken` file.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    if name == BYTES:
        return _bytes()
    path = _file(name)
    try:
        return _tiktoken(path) if path.suffix == ".tiktoken" else _hugging_face(path)
    except InputError:
        raise
    except Exception as error:  # what the libraries raise is of no class of theirs
        raise InputError(
            f"dataset.tokenizer={name}: {path} cannot be read ({error}); name another"
        ) from None


def file_in(folder: Path) -> Path:
    """Return the path of a folder's tokenizer, which may not be there."""
    has_model = not (folder / _JSON).is_file() and (folder / _MODEL).is_file()
    return folder / (_MODEL if has_model else _JSON)


def tokenizer_path(name: str) -> Path:
    """Return the file or folder of a tokenizer; raises InputError if it cannot be downloaded."""
    return Path(local_path("dataset.tokenizer", name, hub.is_small)).expanduser()


def _file(name: str) -> Path:
    path = tokenizer_path(name)
    if path.is_dir():
        path = file_in(path)
    if not path.is_file():
        raise InputError(
            f"dataset.tokenizer={name}: {path} {missing_path(path)}; name a tokenizer.json or a "
            "tokenizer.model, a folder with one, hf://org/name, a .tiktoken file, or bytes"
        )
    return path


def _bytes() -> Tokenizer:
    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts]

    def place(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first = np.repeat(np.arange(len(text)), [len(one.encode(errors="replace")) for one in text])
        return encode([text])[0], first, first + 1

    def decode(run: list[int]) -> str:
        return bytes(token for token in run if token != _END_OF_BYTES).decode(errors="replace")

    known = range(_END_OF_BYTES + 1)
    return Tokenizer(encode, place, _total(decode, known), len(known), _END_OF_BYTES, BYTES)


def _hugging_face(path: Path) -> Tokenizer:
    import tokenizers  # here: checking settings must not load it

    settings = _settings(path.parent)
    if path.suffix == ".model":
        found, settings = _sentencepiece(path, settings)
    else:
        found = tokenizers.Tokenizer.from_file(str(path))
        if _is_llama(settings) and not isinstance(found.decoder, tokenizers.decoders.ByteLevel):
            found.normalizer = None
            scheme = "always" if settings.get("legacy") else "first"
            found.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace("▁", scheme, split=False)
    found.no_padding()
    found.no_truncation()
    special, listed = _special(settings), settings["added_tokens_decoder"]
    tokens = [listed[number] for number in sorted(listed, key=int)]
    tokens += [{"content": text, "special": True} for text in special.values()]
    found.add_tokens([tokenizers.AddedToken(**token) for token in tokens])  # that it lacks
    vocabulary = found.get_vocab(with_added_tokens=True)

    def number_of(role: str, usual: Sequence[str]) -> int | None:
        names = [special[role]] if role in special else usual
        numbers = (found.token_to_id(name) for name in names)
        return next((number for number in numbers if number is not None), None)

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        made = found.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in made]

    def place(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        made = found.encode(text, add_special_tokens=False)
        first, last = np.array(made.offsets, np.int64).reshape(-1, 2).T
        return np.array(made.ids, np.int64), first, last

    texts = (text for text in ("a", *vocabulary) if len(encode([text])[0]))
    sample = found.encode(next(texts, ""))
    inside = [n for n, text in enumerate(sample.sequence_ids) if text == 0] or [0]
    return Tokenizer(
        encode,
        place,
        _total(functools.partial(found.decode, skip_special_tokens=False), vocabulary.values()),
        max(vocabulary.values(), default=-1) + 1,
        number_of("eos_token", _ENDS),
        tokenizer_fingerprint(str(path)),
        settings["templates"],
        special,
        number_of("mask_token", _MASKS),
        tuple(sample.ids[: inside[0]]),
        tuple(sample.ids[inside[-1] + 1 :]),
    )


def _total(
    decode: Callable[[list[int]], str], known: Iterable[int]
) -> Callable[[Sequence[int]], str]:
    """Return `decode` for any tokens: those that are not known stand as U+FFFD.

    A model's vocabulary is often padded, so it may write numbers that its tokenizer does not have.
    """
    has = frozenset(known).__contains__

    def decode_any(tokens: Sequence[int]) -> str:
        runs = itertools.groupby((int(token) for token in tokens), has)
        return "".join(
            decode(list(run)) if is_known else "\ufffd" * len(list(run)) for is_known, run in runs
        )

    return decode_any


def _is_llama(settings: dict[str, Any]) -> bool:
    """Return whether `transformers`, from 5.0 on, puts blanks as its class `LlamaTokenizer` does.

    Whatever its file says, there is a blank before the text, or before each part between special
    tokens if it is a `legacy` one, unless one stands there.
    """
    name = (settings.get("tokenizer_class") or "").removesuffix("Fast")
    return name == "LlamaTokenizer" and settings["model_type"] in (None, "llama")


def _settings(folder: Path) -> dict[str, Any]:
    """Return what the files beside a tokenizer say of it."""
    settings = _tree(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # of older versions of `transformers`
        settings |= _tree(folder / "special_tokens_map.json")
        added = sorted(_tree(folder / "added_tokens.json").items(), key=lambda item: item[1])
        settings["added_tokens_decoder"] = {n: {"content": text} for text, n in added}
    kind = _tree(folder / "config.json").get("model_type")
    return settings | {"model_type": kind, "templates": _templates(folder, settings)}


def _tree(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error}); put it right, or move it away") from None
    return tree if isinstance(tree, dict) else {}


def _special(settings: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by their roles, in the order in which new ones are numbered."""
    roles = dict.fromkeys([*_ROLES, *(key for key in settings if key.endswith("_token"))])
    found = {role: settings.get(role) for role in roles}
    texts = {role: one["content"] if isinstance(one, dict) else one for role, one in found.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str) and text}


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by their names: those in files, else those in the settings."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / _TEMPLATE).is_file():
        files["default"] = folder / _TEMPLATE
    listed = settings.get("chat_template") or []
    if isinstance(listed, str):
        listed = [{"name": "default", "template": listed}]
    inside = {one["name"]: one["template"] for one in listed}
    return {name: files[name].read_text() for name in sorted(files)} or inside


def _sentencepiece(path: Path, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizer of a sentencepiece model, as `transformers` converts it.

    (Kudo and Richardson, 2018, "SentencePiece: A simple and language independent subword tokenizer
    and detokenizer for Neural Text Processing".) The numbers of fields are those of its
    `sentencepiece_model.proto`.

    Args:
        path: the model.
        settings: what the files beside it say.

    Returns:
        The tokenizer, and the settings with the special tokens that the model names.
    """
    from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors

    content = _fields(path.read_bytes())
    pieces = [dict(_fields(piece)) for number, piece in content if number == 1]
    trainer, form = (dict(_fields(dict(content)[number])) for number in (2, 3))
    names = [piece[1].decode() for piece in pieces]
    kinds = [piece.get(3, 1) for piece in pieces]
    roles = {f"{role}_token": trainer.get(*of) for role, of in _SPM_ROLES.items()}
    settings = {role: names[n] for role, n in roles.items() if n < len(names)} | settings
    found = _spm_model(pieces, names, kinds, trainer)
    is_llama = _is_llama(settings)
    if is_llama:  # its own rules of blanks are not asked
        form = {4: 0}
    each, prefix = settings.get("legacy", not is_llama), form.get(3, 1)
    first = [normalizers.Precompiled(form[2])] if form.get(2) else []
    put = [(r"\A +| +\z", ""), (" {2,}", " ")] * form.get(4, 1) + [(" ", "▁")] * form.get(5, 1)
    if prefix and each and not is_llama:
        put += [(r"\A▁", "▁▁")]  # Metaspace puts nothing before a blank
    replaced = (normalizers.Replace(Regex(this), by) for this, by in put)
    found.normalizer = normalizers.Sequence([*first, *replaced])
    scheme = "always" if each else "first"
    cuts: list[Any] = [pre_tokenizers.Metaspace("▁", scheme, split=False)] if prefix else []
    if whole := [name for name, kind in zip(names, kinds, strict=True) if kind == _USERS]:
        pattern = "|".join(map(re.escape, sorted(whole, key=len, reverse=True)))
        cuts += [pre_tokenizers.Split(Regex(pattern), "isolated")]
    found.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    special = (name for name, kind in zip(names, kinds, strict=True) if kind == _CONTROL)
    found.add_tokens([AddedToken(name, special=True) for name in special])
    strips = [decoders.Strip(" ", 1, 0)] * bool(prefix)
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
    )
    texts = _special(settings)
    begin, end = (
        [texts[f"{role}_token"]] if settings.get(f"add_{role}_token") else []
        for role in ("bos", "eos")
    )
    found.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        special_tokens=[(token, found.token_to_id(token)) for token in {*begin, *end}],
    )
    return found, settings


def _spm_model(
    pieces: list[dict[int, Any]], names: list[str], kinds: list[int], trainer: dict[int, Any]
) -> Any:
    """Return a tokenizer of sentencepiece's pieces: a Unigram, or a BPE that merges by scores."""
    from tokenizers import Tokenizer, models

    bits = np.array([piece.get(2, 0) for piece in pieces], np.uint32)
    scores, falls_back = bits.view(np.float32).tolist(), bool(trainer.get(35))
    unknown = trainer.get(40, 0)
    if trainer.get(3, _UNIGRAM) == _UNIGRAM:
        scored = list(zip(names, scores, strict=True))
        return Tokenizer(models.Unigram(scored, unknown, falls_back))
    numbers = {name: number for number, name in enumerate(names)}
    normal = {name: (-scores[n], n) for name, n in numbers.items() if kinds[n] == 1}
    cuts = ((name, name[:cut], name[cut:]) for name in normal for cut in range(1, len(name)))
    pairs = sorted((normal[name], a, b) for name, a, b in cuts if a in normal and b in normal)
    merges = [(left, right) for _, left, right in pairs]
    form = {"fuse_unk": True, "byte_fallback": falls_back, "unk_token": names[unknown]}
    return Tokenizer(models.BPE(numbers, merges, ignore_merges=_USERS in kinds, **form))


def _fields(content: bytes) -> list[tuple[int, Any]]:
    """Return the numbered fields of a message in Protocol Buffers' encoding."""
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.unknown_fields import UnknownFieldSet

    found = UnknownFieldSet(Empty.FromString(content))
    return [(field.field_number, field.data) for field in found]


def _tiktoken(path: Path) -> Tokenizer:
    import base64

    if command := lacking("tiktoken"):
        raise InputError(f"dataset.tokenizer={path} needs the package tiktoken; {command}")
    import tiktoken

    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    cut, end = _RANKS.get(len(ranks), ("cl100k", len(ranks)))
    found = tiktoken.Encoding(
        path.stem, pat_str=_CUTS[cut], mergeable_ranks=ranks, special_tokens={"<|endoftext|>": end}
    )

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(found.encode_ordinary(text), np.int64) for text in texts]

    def place(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        (tokens,) = encode([text])
        first = np.array(found.decode_with_offsets(tokens.tolist())[1], np.int64)
        return tokens, first, np.append(first[1:], len(text))

    return Tokenizer(
        encode,
        place,
        _total(found.decode, [*ranks.values(), end]),
        found.n_vocab,
        end,
        tokenizer_fingerprint(str(path)),
    )
