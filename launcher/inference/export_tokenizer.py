"""The tokenizer that is written beside the weights of a run, for `transformers`."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from launcher.base import to_type
from launcher.config.schema import Config
from launcher.recipes import InputError
from launcher.recipes.data.corpus.files import META, read_meta
from launcher.recipes.data.corpus.tokenizer_files import TokenizerFiles, tokenizer_files
from launcher.recipes.data.corpus.tokenizers import BYTES, tokenizer_fingerprint
from launcher.recipes.data.file_access import FileAccess
from launcher.recipes.data.stored_files import access_to
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.mixture import Mixture
from launcher.recipes.datasets.mixture.dataset import check_tokenizers
from launcher.recipes.datasets.text import Bytes
from launcher.recipes.datasets.tokens import Tokens
from launcher.recipes.models.hugging_face import folder_of

_NONE = TokenizerFiles({}, {})

_log = logging.getLogger(__name__)


class NamedTokenizer(NamedTuple):
    """A tokenizer as `dataset.tokenizer` would name it.

    Attributes:
        name: that.
        chat_template: as `dataset.chat_template`.
        ends_documents: of bytes, whether a token beyond them ends a document.
    """

    name: str
    chat_template: str | None = None
    ends_documents: bool = True


def exported_tokenizer(settings: Config) -> TokenizerFiles:
    """Return the files of a run's tokenizer; none, and a warning that says why, if it has gone."""
    try:
        named = run_tokenizer(settings)
        return tokenizer_files(*named) if named else _NONE
    except (InputError, OSError) as error:
        _log.warning(f"no tokenizer is written with the weights: {error}")
        return _NONE


def run_tokenizer(settings: Config) -> NamedTokenizer | None:
    """Return the tokenizer that made a run's tokens; None if there is none.

    Where the tokens name none, it is the tokenizer of the model that the run started from.

    Raises:
        InputError: it has changed since, or is not there.
        OSError: it cannot be read.
    """
    dataset = settings.dataset
    if isinstance(dataset, Bytes):
        return NamedTokenizer(BYTES, ends_documents=False)
    if isinstance(dataset, Documents):
        return _unchanged(
            FileAccess(), Path(dataset.folder), dataset.tokenizer, dataset.chat_template
        )
    folders: list[str] = []
    if isinstance(dataset, Tokens):
        folders = [dataset.path]
    elif isinstance(dataset, Mixture):
        check_tokenizers(dataset)
        folders = [part["path"] for part in dataset.parts.values()]
    for path in folders:
        access = access_to(path, dataset)
        if access.size(access.root(path) / META) is not None:
            return _unchanged(access, access.root(path), None, None)
    if (start := folder_of(settings.train.init_from or "")) is not None:
        with suppress(InputError):  # it holds none
            tokenizer_fingerprint(str(start))
            return NamedTokenizer(str(start))
    return None


def warn_of_other_tokens(settings: Config, asked: Config) -> None:
    """Log a warning if the data asked for were made by another tokenizer than the run's."""
    try:
        named = run_tokenizer(settings), run_tokenizer(asked)
        prints = {tokenizer_fingerprint(one.name) for one in named if one is not None}
    except (InputError, OSError):  # one that has gone cannot be compared
        return
    if len(prints) > 1:
        theirs, ours = (one.name for one in named if one is not None)
        _log.warning(
            f"the run's tokens were made by {theirs}, and dataset={asked.dataset.name} has those "
            f"of {ours}: unless both make the same tokens, the loss says nothing; "
            f"prepare the data with {to_type(('dataset.tokenizer', str(theirs)))}"
        )


def _unchanged(
    access: FileAccess, folder: Path, name: str | None, template: str | None
) -> NamedTokenizer:
    """Return what made a folder of tokens; raises InputError if it is another now."""
    folder = access.root(str(folder))
    if access.size(folder / META) is not None:
        made = read_meta(folder, str(folder), access)
        name = name or made.tokenizer
        if tokenizer_fingerprint(name) != made.tokenizer_fingerprint:
            raise InputError(f"{name} has changed since {folder} was made")
    assert name is not None
    return NamedTokenizer(name, template)
