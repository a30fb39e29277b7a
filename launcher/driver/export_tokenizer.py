"""The tokenizer that is written beside the weights of a run, for `transformers`."""

from __future__ import annotations

import logging
from pathlib import Path

from launcher.config.schema import Config
from recipes import InputError
from recipes.corpus.meta import META, read_meta
from recipes.corpus.tokenizer_files import TokenizerFiles, tokenizer_files
from recipes.corpus.tokenizers import BYTES, tokenizer_fingerprint
from recipes.documents_options import Documents
from recipes.hugging_face import folder_of
from recipes.mixture_options import Mixture
from recipes.text_options import Bytes
from recipes.tokens_options import Tokens

_NONE = TokenizerFiles({}, {})

_log = logging.getLogger(__name__)


def exported_tokenizer(settings: Config) -> TokenizerFiles:
    """Return the files of a run's tokenizer; none, and a warning that says why, if it has gone.

    It is the one that made the run's tokens. Of tokens that do not name theirs it is that of the
    model that the run started from.
    """
    dataset = settings.dataset
    try:
        if isinstance(dataset, Bytes):
            return tokenizer_files(BYTES, ends_documents=False)
        if isinstance(dataset, Documents):
            return _unchanged(Path(dataset.folder), dataset.tokenizer, dataset.chat_template)
        folders: list[str] = []
        if isinstance(dataset, Tokens):
            folders = [dataset.path]
        elif isinstance(dataset, Mixture):
            folders = [part["path"] for part in dataset.parts.values()]
        for folder in map(Path, folders):
            if (folder / META).is_file():
                return _unchanged(folder, None, None)
        start = folder_of(settings.train.init_from or "")
        if start is not None and (start / "tokenizer.json").is_file():
            return tokenizer_files(str(start))
    except (InputError, OSError) as error:
        _log.warning(f"no tokenizer is written with the weights: {error}")
    return _NONE


def _unchanged(folder: Path, name: str | None, template: str | None) -> TokenizerFiles:
    """Return the files of what made a folder of tokens; raises InputError if it is another now."""
    folder = folder.expanduser()
    if (folder / META).is_file():
        made = read_meta(folder, str(folder))
        name = name or made.tokenizer
        if tokenizer_fingerprint(name) != made.tokenizer_fingerprint:
            raise InputError(f"{name} is not what it was when {folder} was made")
    assert name is not None
    return tokenizer_files(name, template)
