"""A run, or a model in Hugging Face's form, as lm-eval (`pip install lm-eval`) asks it.

    import lm_eval
    from launcher.inference.lm_eval import LanguageModel

    lm_eval.simple_evaluate(model=LanguageModel("outputs/mine"), tasks=["lambada_openai"])

The model lies on the devices of this process, sharded as for `task=generate`; its family must have
a decoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.model import LM

from launcher import checkpoint
from launcher.arrays.stacked_array import spec_at
from launcher.base import hub
from launcher.checkpoint.train_state import flat_name, map_named
from launcher.config.compose import load, load_frozen
from launcher.config.errors import ConfigError
from launcher.inference.export_tokenizer import run_tokenizer
from launcher.inference.placed_model import ModelPlaces, layout_of
from launcher.inference.stored_model import stored_plan
from launcher.recipes import build_model
from launcher.recipes.data.corpus.tokenizers import load_tokenizer
from launcher.recipes.models.decoding import Generator, Sampling, build_decoder
from launcher.recipes.models.hugging_face import (
    CONFIG,
    PREFIX,
    family_name,
    family_of,
    folder_of,
    read_config,
)

_MOST_NEW = 256  # tokens, where a task does not say


class LanguageModel(LM):
    """A language model for lm-eval.

    Args:
        where: a run's folder, a checkpoint in it, or a folder as `transformers` writes it, also as
            `hf://org/name`.
        batch_size: texts that are read together.

    Raises:
        ConfigError: there is no such model, or it has no tokenizer.
        launcher.recipes.InputError: its family has no decoder, or the tokenizer cannot be used.
    """

    def __init__(self, where: str, batch_size: int = 8) -> None:
        super().__init__()
        path = folder_of(where, hub.is_model) or Path(where).expanduser().absolute()
        found = _theirs(path) if (path / CONFIG).exists() else _run(path)
        self._decoder = build_decoder(found.options, "fp32")
        self._params, self._places = found.params, found.places
        self._generator = Generator(self._decoder, Sampling(0), self._places)
        self._tokenizer = load_tokenizer(found.tokenizer)
        self._batch_size = batch_size
        self._score = jax.jit(self._scores, out_shardings=self._places.whole)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return of each continuation its log-probability, and whether it is the greedy one."""
        asked = []
        for context, continuation in (request.args for request in requests):
            # Words may join where both meet, so both are read as one text, and as much is scored
            # as the continuation has added; blanks between them belong to it, as in lm-eval.
            before = len(self._tokenizer.prompt(context.rstrip()))
            whole = self._tokenizer.prompt(context + continuation)
            first = [] if before or self._tokenizer.end_token is None else [self._end()]
            asked.append(([*first, *whole], max(before + len(first), 1)))
        return self._likelihoods(asked)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of each text, a window of the model's length at a time."""
        found = []
        for (text,) in (request.args for request in requests):
            tokens = self._tokenizer.prompt(text)
            if not self._tokenizer.begin and self._tokenizer.end_token is not None:
                tokens = [self._end(), *tokens]
            step = self._decoder.length - 1
            starts = range(0, max(len(tokens) - 1, 1), step)
            windows = [(tokens[start : start + step + 1], 1) for start in starts]
            found.append(sum(value for value, _ in self._likelihoods(windows)))
        return found

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continue each text greedily, up to a stop string."""
        return [self._generated(*request.args) for request in requests]

    def _generated(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        ends = [until] if isinstance(until, str) else until
        most = settings.get("max_gen_toks", settings.get("max_new_tokens", _MOST_NEW))
        prompt = self._tokenizer.prompt(context) or [self._end()]
        made: list[int] = []
        text = ""
        for (token,) in self._generator(self._params, [prompt], most):
            if token == self._tokenizer.end_token:
                break
            made.append(int(token))
            text = self._tokenizer.decode(made)
            if any(end in text for end in ends):
                break
        return text[: min((text.index(end) for end in ends if end in text), default=None)]

    def _likelihoods(self, asked: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Return each text's log-probability from a token on, and whether it is greedy."""
        found: list[tuple[float, bool]] = []
        for begin in range(0, len(asked), self._batch_size):
            rows = []
            for tokens, first in asked[begin : begin + self._batch_size]:
                cut = max(len(tokens) - self._decoder.length, 0)  # the newest that it can read
                rows.append((tokens[cut:], max(first - cut, 1)))
            longest = max(len(tokens) for tokens, _ in rows)
            length = min(2 ** math.ceil(math.log2(max(longest, 2))), self._decoder.length)
            padded = np.zeros((self._batch_size, length), np.int32)
            for row, (tokens, _) in zip(padded, rows, strict=False):
                row[: len(tokens)] = tokens
            scores, likeliest = map(np.asarray, self._score(self._params, padded))
            for number, (tokens, first) in enumerate(rows):
                part = slice(first - 1, max(len(tokens) - 1, first - 1))
                greedy = (likeliest[number, part] == padded[number, 1:][part]).all()
                found.append((float(scores[number, part].sum()), bool(greedy)))
        return found

    def _scores(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return each next token's log-probability and the likeliest token.

        Both are [batch, length - 1], of tokens, int32 [batch, length].
        """
        rows = tokens.shape[0]
        last = jnp.zeros(rows, jnp.int32)

        def read(cache: Any, place: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
            token = jax.lax.dynamic_slice_in_dim(tokens, place, 1, axis=1)
            at = jnp.full(rows, place, jnp.int32)
            logits, cache = self._decoder.read(params, cache, token, at, last)
            following = jnp.take(tokens, place + 1, axis=1)[:, None]
            score = jnp.take_along_axis(jax.nn.log_softmax(logits), following, axis=1)[:, 0]
            return cache, (score, logits.argmax(-1))

        numbers = jnp.arange(tokens.shape[1] - 1)
        cache = jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x, self._places.cache(x.shape)),
            self._decoder.cache(rows),
        )
        _, (scores, likeliest) = jax.lax.scan(read, cache, numbers)
        return scores.T, likeliest.T

    def _end(self) -> int:
        """Return the token that stands before a document; raises ConfigError if there is none."""
        if self._tokenizer.end_token is None:
            raise ConfigError("the tokenizer has no token that ends a text, to begin one with")
        return self._tokenizer.end_token


class _Found(NamedTuple):
    """A model: its settings, its parameters and where they lie, and its tokenizer's name."""

    options: Any
    params: Any
    places: ModelPlaces
    tokenizer: str


def _run(path: Path) -> _Found:
    """Return the model of a run."""
    try:
        source, _ = checkpoint.resolve(path)
        home = path if (path / "config.yaml").exists() else path.parents[1]
        settings = load_frozen(home / "config.yaml")
        model = checkpoint.FinishedModel(source, settings.optimizer.lora, False)
        checkpoint.check_vocabulary(settings.model, model.shapes)
    except (checkpoint.InitError, checkpoint.Mismatch, OSError) as error:
        raise ConfigError(f"{path} is not a run to evaluate: {error}") from None
    tokenizer = run_tokenizer(settings)
    if tokenizer is None:
        raise ConfigError(f"{path} has no tokenizer: dataset={settings.dataset.name} names none")
    devices = jax.local_devices()
    places = ModelPlaces(layout_of(stored_plan(home), model.shapes, len(devices)), devices)
    return _Found(settings.model, places.load(model)["params"], places, tokenizer.name)


def _theirs(path: Path) -> _Found:
    """Return the model of a folder as `transformers` writes it."""
    family = family_name(family_of(read_config(path)))
    options = load([f"model={family}", f"model.size={PREFIX}{path}", "dataset=synthetic"]).model
    model = {"params": jax.eval_shape(build_model(options, "fp32").init, jax.random.key(0))}
    leaves = jax.tree_util.tree_leaves_with_path(model)
    shapes = {flat_name(where): leaf.shape for where, leaf in leaves}
    devices = jax.local_devices()
    layout = layout_of(None, shapes, len(devices))
    places = ModelPlaces(layout, devices)
    like = map_named(lambda name, leaf: spec_at(leaf, places.of_model(name)), model)
    return _Found(options, checkpoint.restore_model(path, like)["params"], places, str(path))
