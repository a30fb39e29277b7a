"""Text from a language model: reading with a cache, and sampling.

A family that can go on with a text has, beside `<name>.py`, a module `<name>_decoder.py` with
`build_decoder(options, precision) -> Decoder`. A user's own model has that function in its module,
and a dataset of text `tokenizer(options) -> Tokenizer` in its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from launcher.config.families import builder_of
from recipes import InputError, users_function


class Decoder(NamedTuple):
    """A language model that reads a text piece by piece, as two pure functions.

    Attributes:
        cache: takes a number of rows and returns a cache that knows no text.
        read: takes the parameters, a cache, tokens (int32 [batch, length]), the position of each
            row's first one (int32 [batch]) and the place in `tokens` of its last one (int32
            [batch]); returns the logits of the token after that, float32 [batch, vocab_size], and
            the cache. What follows a row's last token is read over by the next call.
        length: the longest text.
    """

    cache: Callable[[int], Any]
    read: Callable[..., tuple[jax.Array, Any]]
    length: int


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0: the likeliest token is taken.
        top_k: draws from so many of the likeliest alone; 0: from all.
        top_p: draws from the likeliest alone whose probabilities add up to this.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def build_decoder(options: Any, precision: str) -> Decoder:
    """Return the decoder of the model that `options` describe.

    Raises:
        InputError: the family has none.
    """
    if options.name == "custom":
        build = users_function("model", options, "build_decoder")
        if build is None:
            raise InputError(
                f"model.module={options.module} cannot generate text: it has no function "
                "build_decoder; write one, of recipes.decoding.without_cache"
            )
    else:
        name = f"{builder_of(type(options))}_decoder"
        if find_spec(name) is None:
            raise InputError(
                f"model.name={options.name} cannot generate text: it has no decoder; "
                "model=gpt, model=llama and model=moe have one"
            )
        build = functools.partial(import_module(name).build_decoder, options)
    decoder: Decoder = build(precision)
    return decoder


def without_cache(logits: Callable[[Any, jax.Array], jax.Array], length: int) -> Decoder:
    """Return the decoder of a model that reads the whole text anew for each token.

    Args:
        logits: takes the parameters and tokens, int32 [batch, length]; returns the logits of the
            token after each, [batch, length, vocab_size], none of which depends on later tokens.
        length: the longest text.
    """

    def cache(batch: int) -> jax.Array:
        return jnp.zeros((batch, length), jnp.int32)

    def read(
        params: Any, cache: jax.Array, tokens: jax.Array, start: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        rows = jnp.arange(tokens.shape[0])[:, None]
        places = start[:, None] + jnp.arange(tokens.shape[1])
        text = cache.at[rows, places].set(tokens, mode="drop")
        return logits(params, text)[rows[:, 0], start + last].astype(jnp.float32), text

    return Decoder(cache, read, length)


def draw(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Return a token for each row, int32 [batch].

    (Holtzman et al., 2020, "The Curious Case of Neural Text Degeneration": `top_p`.)

    Args:
        logits: float32 [batch, vocab_size].
        key: a random key.
        sampling: how to draw.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    ordered = jnp.sort(logits, axis=-1)[:, ::-1]
    if sampling.top_k:
        lowest = ordered[:, min(sampling.top_k, logits.shape[-1]) - 1, None]
        logits = jnp.where(logits < lowest, -jnp.inf, logits)
        ordered = jnp.where(ordered < lowest, -jnp.inf, ordered)
    if sampling.top_p < 1:
        shares = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares  # of all that are likelier
        kept = jnp.sum(before < sampling.top_p, axis=-1)
        lowest = jnp.take_along_axis(ordered, jnp.maximum(kept, 1)[:, None] - 1, axis=-1)
        logits = jnp.where(logits < lowest, -jnp.inf, logits)
    return jax.random.categorical(key, logits).astype(jnp.int32)


class TextPlaces(NamedTuple):
    """Where the arrays of a generation lie.

    Attributes:
        whole: the sharding of what all devices have.
        cache: returns the sharding of an array of the cache, of its shape.
    """

    whole: Any
    cache: Callable[[tuple[int, ...]], Any]


class Generator:
    """Goes on with texts; its programs are compiled at first use and stay.

    Args:
        decoder: the model.
        sampling: how to draw tokens.
        places: where arrays lie; None: where the parameters do, on one device.
    """

    def __init__(
        self, decoder: Decoder, sampling: Sampling, places: TextPlaces | None = None
    ) -> None:
        self._decoder, self._sampling, self._places = decoder, sampling, places
        self._read: dict[int, Any] = {}  # by the number of rows

    def __call__(
        self, params: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0
    ) -> Iterator[np.ndarray]:
        """Yield the next token of each prompt, int32 [batch], so many times.

        All rows are read together. Where a text becomes longer than the model can read, it goes on
        from the newer half of that.

        Args:
            params: the model's parameters.
            prompts: the tokens of each prompt, at least one.
            max_new_tokens: how many tokens to yield.
            seed: of the random numbers.
        """
        longest = self._decoder.length
        half = max(longest // 2, 1)
        texts = [list(prompt)[-longest:] for prompt in prompts]
        empty, read = self._programs(len(texts))
        cache, lengths = None, np.zeros(len(texts), np.int32)
        for number in range(max_new_tokens):
            own = np.array([seed, number], np.uint32)
            if cache is None or max(lengths) >= longest:
                if cache is not None:
                    texts = [text[-half:] for text in texts]
                cache, lengths = empty(), np.array([len(t) for t in texts], np.int32)
                tokens = np.zeros((len(texts), max(lengths)), np.int32)
                for row, text in zip(tokens, texts, strict=True):
                    row[: len(text)] = text
                new, cache = read(params, cache, tokens, np.zeros_like(lengths), lengths - 1, own)
            else:
                tokens = np.array([text[-1:] for text in texts], np.int32)
                new, cache = read(params, cache, tokens, lengths, np.zeros_like(lengths), own)
                lengths = lengths + 1
            drawn = np.asarray(new)
            for text, token in zip(texts, drawn, strict=True):
                text.append(int(token))
            yield drawn

    def _programs(self, rows: int) -> tuple[Any, Any]:
        """Return what makes an empty cache, and what reads tokens and draws the next."""
        if rows in self._read:
            return self._read[rows]
        decoder, sampling = self._decoder, self._sampling

        def read(params: Any, cache: Any, tokens: Any, start: Any, last: Any, own: Any) -> Any:
            logits, cache = decoder.read(params, cache, tokens, start, last)
            key = jax.random.fold_in(jax.random.key(own[0]), own[1])
            return draw(logits, key, sampling), cache

        at: dict[str, Any] = {}
        of_cache: dict[str, Any] = {}
        if (places := self._places) is not None:
            shapes = jax.eval_shape(lambda: decoder.cache(rows))
            where = jax.tree.map(lambda leaf: places.cache(leaf.shape), shapes)
            at = {"out_shardings": (places.whole, where)}
            of_cache = {"out_shardings": where}
        empty = jax.jit(lambda: decoder.cache(rows), **of_cache)
        self._read[rows] = empty, jax.jit(read, donate_argnums=1, **at)
        return self._read[rows]
