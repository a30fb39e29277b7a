"""The checkpoint or file that a new run takes its model from, `train.init_from`, and its tokens."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from launcher import checkpoint
from launcher.base import DamagedError, hub, to_type
from launcher.checkpoint.layout import METADATA
from launcher.config.errors import ConfigError
from launcher.config.reader import from_dict
from launcher.config.schema import Config
from launcher.driver.folder import folder
from launcher.recipes import InputError
from launcher.recipes.data.corpus.files import find_corpus
from launcher.recipes.data.corpus.tokenizers import BYTES, load_tokenizer, tokenizer_fingerprint
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.mixture import Mixture
from launcher.recipes.datasets.text import Bytes
from launcher.recipes.datasets.tokens import Tokens
from launcher.recipes.models.hugging_face import (
    CONFIG,
    PREFIX,
    family_named,
    family_of,
    folder_of,
    read_config,
)

_KEY = "train.init_from"
_KINDS = {"model.name", "optimizer.name"}

_RUNS_REMEDY = "Use the model settings of the run that saved it; they are in its config.yaml."
_ARRAYS_REMEDY = (
    "An array has the name and the shape of a leaf of the model's; task=export writes such a file "
    "of a run."
)
_FOLDERS_REMEDY = (
    f"Its arrays and its {CONFIG} must be of one model, as transformers' save_pretrained writes "
    f"them; model.size={PREFIX}<folder> takes the settings from there."
)

_log = logging.getLogger(__name__)
_SAMPLE = (
    "The quick brown fox jumps over the lazy dog, and 1,024 others follow.\n"
    "def add(x, y):\n    return x + y  # naïve, Ωμέγα, 日本語\n"
)


def find_start(config: Config, finished: int, thorough: bool = True) -> Path | None:
    """Return the checkpoint or `.npz` file to start from, or None for a fresh start.

    It is None, too, if the run resumes from a checkpoint of its own. With `run.fork` it is the
    checkpoint of the other run.

    Args:
        config: the settings.
        finished: how many steps of its own the run has finished.
        thorough: whether to read all files and compare their checksums.

    Raises:
        ConfigError: `train.init_from` is no intact checkpoint and no file of arrays, or a model
            that has learned other tokens than the data's.
        InputError: a tokenizer cannot be read.
    """
    if (parent := folder.parent_of(config)) is not None:
        _check_parent(config, parent)
        return parent.path
    named = config.train.init_from
    if finished and (named or config.run.fork):
        key = "run.fork" if config.run.fork else _KEY
        _log.warning(f"{key} is not used: run {config.run.id} resumes from its own step {finished}")
    if finished or named is None:
        return None
    theirs = folder_of(named, hub.is_model if thorough else hub.is_small)
    try:
        path, damaged = checkpoint.resolve(theirs or Path(named), thorough)
        if (path / CONFIG).exists():
            _check_settings(config, named, path)
        elif theirs is not None:
            raise checkpoint.InitError(f"has no {CONFIG}")
    except checkpoint.InitError as error:
        raise ConfigError(
            f"{_KEY}={named} {error}",
            "Name a checkpoint (<run folder>/checkpoints/<step>), the folder of a run, an .npz "
            "file of arrays, hf:<folder> for one that transformers has written, or hf://org/name.",
        ) from None
    for line in damaged:
        _log.warning(line)
    if (path / CONFIG).exists():
        check_tokenizer(config.dataset, named, path)
    _log.info(f"parameters from {path}")
    return path.absolute()


def _check_settings(config: Config, named: str, path: Path) -> None:
    """Check a Hugging Face model against the settings, shapes aside.

    Raises:
        ConfigError: it does not, or it is of another family.
        InitError: its `config.json` cannot be used.
    """
    name = config.model.name
    size = named if hub.is_name(named) else f"{PREFIX}{path}"
    words = to_type(("model", name), ("model.size", size))
    remedy = f"Take them from there: {words}"
    try:
        stored = read_config(path)
        family = family_of(stored)
        theirs = family.options_of(stored)
    except (DamagedError, KeyError, OSError) as error:
        lacks = f"{CONFIG} lacks {error}" if isinstance(error, KeyError) else error
        raise checkpoint.InitError(f"cannot be used: {lacks}") from None
    if family is not family_named(name):
        raise ConfigError(
            f"{_KEY}={named} is a {stored['model_type']}, which model={name} is not",
            f"Its arrays have other names than those of model={name}.",
        )
    free = {"sequence_length", *getattr(family, "CHOICES", ())}
    for key, value in theirs.items():
        own = getattr(config.model, key)
        if key not in free and own != value:
            raise ConfigError(f"{_KEY}={named} has {key}={value}, and model.{key} is {own}", remedy)


def _check_parent(config: Config, parent: folder.Parent) -> None:
    """Check a parent without tracing; raises ConfigError if it is of another kind."""
    if _KINDS & folder.differences(parent.run, config).keys():
        raise _unfit(config, parent, "its state is of another kind", *_KINDS)
    try:
        theirs, ours = _maker(from_dict(parent.settings).dataset), _maker(config.dataset)
    except (ConfigError, InputError, OSError):  # data that has gone
        return
    if theirs and ours and theirs.fingerprint != ours.fingerprint:
        made = f"its tokens are made by {theirs.name}, and these by {ours.name}"
        raise _unfit(config, parent, made, "dataset.")


def check_parent_state(config: Config, state: Any) -> None:
    """Check that the checkpoint that `run.fork` names holds such a state; raises ConfigError."""
    # The run's own folder may hold the copy already.
    parent = folder.parent_of(replace(config, run=replace(config.run, id=None)))
    assert parent is not None
    try:
        checkpoint.check_state(parent.path, state)
    except checkpoint.Mismatch as error:
        raise _unfit(config, parent, str(error), "model.", "optimizer.") from None


def _unfit(config: Config, parent: folder.Parent, problem: str, *names: str) -> ConfigError:
    """Return the error for a parent; it lists the settings below these names that differ."""
    changed = folder.differences(parent.run, config)
    was = "".join(f"; {key} was {changed[key][0]}" for key in changed if key.startswith(names))
    return ConfigError(
        f"run.fork={config.run.fork} does not fit: {problem}{was}",
        "Set that back; or begin with the parameters alone, if they fit: "
        f"{to_type(('train.init_from', str(parent.path)))} in place of run.fork.",
    )


def check_start(named: str | None, path: Path, model: Mapping[str, Any]) -> None:
    """Check that the model in a checkpoint or a file fits this one.

    Args:
        named: `train.init_from`, for the message.
        path: the checkpoint, or the `.npz` file.
        model: the model's parts (`TrainState.model`), trees of `jax.ShapeDtypeStruct`.

    Raises:
        ConfigError: they differ in names, shapes or, of a file, kinds of numbers.
    """
    try:
        checkpoint.check_model(path, model)
    except checkpoint.Mismatch as error:
        raise ConfigError(
            f"{_KEY}={named} does not fit the model: {error}", _remedy(path)
        ) from None


def _remedy(path: Path) -> str:
    """Return the remedy where the arrays of a start are not those of the model."""
    if (path / METADATA).exists():
        return _RUNS_REMEDY
    return _FOLDERS_REMEDY if (path / CONFIG).exists() else _ARRAYS_REMEDY


class _Maker(NamedTuple):
    """What made the data's tokens: its name and its fingerprint."""

    name: str
    fingerprint: str


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
    try:
        theirs = tokenizer_fingerprint(str(path))
    except InputError:  # there is none
        return
    maker = _maker(dataset)
    if maker is None or maker.fingerprint == theirs:
        return
    made = "are bytes" if maker.name == BYTES else f"are made by {maker.name}"
    differs = f"{_KEY}={named} has a tokenizer, and the tokens of dataset={dataset.name} {made}"
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
    share = _share(*(load_tokenizer(name).prompt(_SAMPLE) for name in (str(path), maker.name)))
    if share < 0.5:
        raise ConfigError(
            f"{differs}, which are others for the same text: the model would know none of them",
            f"{_tokenizer_remedy(dataset, named if hub.is_name(named) else path)} To train it on "
            "these tokens all the same, move its tokenizer to another folder.",
        )
    if share < 1:
        _log.warning(f"{differs}: of a sample text only {share:.0%} of the tokens are the same")


def _maker(dataset: Any) -> _Maker | None:
    """Return the tokenizer of the data's tokens; None if it is not recorded, or there are none."""
    if isinstance(dataset, Bytes):
        return _Maker(BYTES, BYTES)
    if isinstance(dataset, Documents):
        return _Maker(dataset.tokenizer, tokenizer_fingerprint(dataset.tokenizer))
    paths: dict[str, str] = {}
    if isinstance(dataset, Tokens):
        paths = {"dataset.path": dataset.path}
    elif isinstance(dataset, Mixture):
        paths = {f"dataset.parts.{name}.path": p["path"] for name, p in dataset.parts.items()}
    for key, path in paths.items():
        meta = find_corpus(path, dataset.dtype, key, dataset).meta
        if meta is not None:
            return _Maker(meta.tokenizer, meta.tokenizer_fingerprint)
    return None


def _share(theirs: list[int], ours: list[int]) -> float:
    """Return the share of tokens that two have in common, wherever they stand."""
    counts = [Counter(tokens) for tokens in (theirs, ours)]
    longest = max(count.total() for count in counts)
    return (counts[0] & counts[1]).total() / longest if longest else 1.0


def _tokenizer_remedy(dataset: Any, path: str | Path) -> str:
    setting = to_type(("dataset.tokenizer", str(path)))
    if isinstance(dataset, Documents):
        return f"Set {setting} here."
    if isinstance(dataset, Bytes):
        return f"Use dataset=jsonl, parquet, arrow or documents, with {setting} here."
    return f"Prepare the data with {setting} first."
