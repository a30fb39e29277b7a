"""Check of the data's tokens against the tokenizer of the model to start from."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from launcher.config.errors import ConfigError
from launcher.recipes import InputError
from launcher.recipes.data.corpus.files import find_corpus
from launcher.recipes.data.corpus.tokenizers import BYTES, load_tokenizer, tokenizer_fingerprint
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.mixture import Mixture
from launcher.recipes.datasets.text import Bytes
from launcher.recipes.datasets.tokens import Tokens

_KEY = "train.init_from"
FILE = "tokenizer.json"
_SAMPLE = (
    "The quick brown fox jumps over the lazy dog, and 1,024 others follow.\n"
    "def add(x, y):\n    return x + y  # naïve, Ωμέγα, 日本語\n"
)

_log = logging.getLogger(__name__)


class _Maker(NamedTuple):
    """What made the data's tokens: its name, its fingerprint and the setting that says so."""

    name: str
    fingerprint: str
    key: str


def check_tokenizer(dataset: Any, named: str, path: Path) -> None:
    """Refuse data whose tokens are not those of the tokenizer that lies beside the weights.

    It is another if it gives other tokens for a sample text. One that has been extended gives most
    of the same ones; then, and where the data's tokenizer is not there to be compared, a warning is
    logged.

    Args:
        dataset: the settings of the section `dataset`.
        named: `train.init_from`.
        path: the folder that it names.

    Raises:
        ConfigError: fewer than half of the tokens are the same.
        InputError: a tokenizer cannot be read.
    """
    maker = _maker(dataset) if (path / FILE).is_file() else None
    if maker is None or maker.fingerprint == tokenizer_fingerprint(str(path)):
        return
    made = "are bytes" if maker.name == BYTES else f"are made by {maker.name}"
    differs = f"{_KEY}={named} has a {FILE}, and the tokens of dataset={dataset.name} {made}"
    try:
        is_there = tokenizer_fingerprint(maker.name) == maker.fingerprint
    except InputError:
        is_there = False
    if not is_there:
        _log.warning(
            f"{differs}, a file that is another or not there to be compared: unless both make the "
            "same tokens, the model begins with wrong ones"
        )
        return
    share = _share(*(load_tokenizer(name).encode([_SAMPLE])[0] for name in (str(path), maker.name)))
    if share < 0.5:
        raise ConfigError(
            f"{differs}, which are others for the same text: the model would know none of them",
            f"{_remedy(dataset, path)} To train it on these tokens all the same, move its {FILE} "
            "to another folder.",
            [_KEY, maker.key],
        )
    if share < 1:
        _log.warning(f"{differs}: of a sample text only {share:.0%} of the tokens are the same")


def _maker(dataset: Any) -> _Maker | None:
    """Return the tokenizer of the data's tokens; None if it is not recorded, or there are none."""
    if isinstance(dataset, Bytes):
        return _Maker(BYTES, BYTES, "dataset.name")
    if isinstance(dataset, Documents):
        name = dataset.tokenizer
        return _Maker(name, tokenizer_fingerprint(name), "dataset.tokenizer")
    paths: dict[str, str] = {}
    if isinstance(dataset, Tokens):
        paths = {"dataset.path": dataset.path}
    elif isinstance(dataset, Mixture):
        paths = {f"dataset.parts.{name}.path": p["path"] for name, p in dataset.parts.items()}
    for key, path in paths.items():
        meta = find_corpus(path, dataset.dtype, key).meta
        if meta is not None:
            return _Maker(meta.tokenizer, meta.tokenizer_fingerprint, key)
    return None


def _share(theirs: Any, ours: Any) -> float:
    """Return the share of tokens that two have in common, wherever they stand."""
    counts = [Counter(tokens.tolist()) for tokens in (theirs, ours)]
    longest = max(count.total() for count in counts)
    return (counts[0] & counts[1]).total() / longest if longest else 1.0


def _remedy(dataset: Any, path: Path) -> str:
    setting = f"dataset.tokenizer={path}"
    if isinstance(dataset, Documents):
        return f"Set {setting}."
    if isinstance(dataset, Bytes):
        return f"Use dataset=jsonl, parquet, arrow or documents, with {setting}."
    return f"Prepare the data with {setting}."
