"""Text from a language model: reading with a cache, and sampling.

A family that continues texts has, beside `build`, `build_decoder(options, precision) -> Decoder`,
and so does a user's own model; a dataset of text has `tokenizer(options) -> Tokenizer`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from launcher.hardware import has_bf16
from launcher.recipes import further_function
from launcher.recipes.protocols import InputError
from launcher.trace import products_in_fp32

_SHORT = 16  # tokens that take less time one by one than a program takes to compile for them


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
        top_k: draws from the `top_k` likeliest tokens alone; 0: from all.
        top_p: draws from the likeliest tokens alone whose probabilities sum to this.
        seed: of the random numbers.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def build_decoder(options: Any, precision: str, compute_capability: float | None = None) -> Decoder:
    """Return the decoder of the model that `options` describe, as `build_model` returns the model.

    Raises:
        InputError: the family has none.
    """
    build = further_function("model", options, "build_decoder")
    if build is not None:
        decoder: Decoder = build(precision)
        if has_bf16(compute_capability):
            return decoder
        return Decoder(decoder.cache, products_in_fp32(decoder.read), decoder.length)
    if options.name == "custom":
        raise InputError(
            f"model.module={options.module} cannot generate text: it has no function "
            "build_decoder; write one, of launcher.recipes.models.decoding.without_cache"
        )
    raise InputError(
        f"model.name={options.name} cannot generate text: it has no decoder; "
        "model=gpt, model=llama and model=moe have one"
    )


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


def _width(length: int) -> int:
    """Return how many tokens to read at a time, given the length of the longest text."""
    return 1 if length <= _SHORT else length


class TextPlaces(Protocol):
    """Shardings of the arrays of a generation."""

    @property
    def whole(self) -> Any:
        """The sharding of arrays that all devices have."""

    def cache(self, shape: tuple[int, ...]) -> Any:
        """Return the sharding of an array of the cache."""


class Generator:
    """Continues texts; its programs are compiled for the parameters of its first call and kept.

    Compiling often takes longer than writing a text. So all programs that a text will need are
    compiled at its beginning, in threads, and short texts need none but that for single tokens.

    Args:
        decoder: the model.
        sampling: how to draw tokens.
        places: where arrays lie; None: where the parameters do, on one device.
    """

    def __init__(
        self, decoder: Decoder, sampling: Sampling, places: TextPlaces | None = None
    ) -> None:
        self._decoder, self._sampling, self._places = decoder, sampling, places
        self._compiler = ThreadPoolExecutor(os.cpu_count(), "launcher-generator")
        # Nobody waits for programs that a text turned out not to need.
        weakref.finalize(self, self._compiler.shutdown, wait=False, cancel_futures=True)
        # By the number of rows; and by that and the number of tokens of each.
        self._empty: dict[int, Future[Any]] = {}
        self._read: dict[tuple[int, int], Future[Any]] = {}

    def __call__(
        self, params: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> Iterator[np.ndarray]:
        """Yield the next token of each prompt, int32 [batch], `max_new_tokens` times.

        All rows are read together. A text that outgrows the model continues from its newer half.

        Args:
            params: the model's parameters.
            prompts: the tokens of each prompt, at least one.
            max_new_tokens: how many tokens to yield.
        """
        longest = self._decoder.length
        half = max(longest // 2, 1)
        texts = [list(prompt)[-longest:] for prompt in prompts]
        rows, first = len(texts), max(map(len, texts))
        self._begin(params, rows, _width(first))
        if max_new_tokens > 1:
            self._begin(params, rows, 1)
        if first + max_new_tokens - 1 > longest:
            self._begin(params, rows, _width(half))
        cache, known = None, np.zeros(rows, np.int32)
        for number in range(max_new_tokens):
            own = np.array([self._sampling.seed, number], np.uint32)
            if cache is None or max(known) >= longest:
                if cache is not None:
                    texts = [text[-half:] for text in texts]
                known = np.array([len(text) for text in texts], np.int32)
                drawn, cache = self._read_all(params, texts, known, own)
            else:
                tokens = np.array([text[-1:] for text in texts], np.int32)
                read = self._begin(params, rows, 1).result()
                new, cache = read(params, cache, tokens, known, np.zeros_like(known), own)
                drawn, known = np.asarray(new), known + 1
            for text, token in zip(texts, drawn, strict=True):
                text.append(int(token))
            yield drawn

    def _read_all(
        self, params: Any, texts: Sequence[Sequence[int]], lengths: np.ndarray, own: np.ndarray
    ) -> tuple[np.ndarray, Any]:
        """Read texts of these lengths; return the token after each, and the cache."""
        rows, longest = len(texts), int(max(lengths))
        tokens = np.zeros((rows, longest), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        drawn, cache = np.zeros(rows, np.int32), self._empty[rows].result()()
        width = _width(longest)
        read = self._begin(params, rows, width).result()
        for start in range(0, longest, width):
            last = lengths - 1 - start
            piece, begins = tokens[:, start : start + width], np.full_like(lengths, start)
            new, cache = read(params, cache, piece, begins, np.clip(last, 0, width - 1), own)
            drawn = np.where((last >= 0) & (last < width), np.asarray(new), drawn)
        return drawn, cache

    def _begin(self, params: Any, rows: int, length: int) -> Future[Any]:
        """Begin to compile what reads `length` tokens of each row and draws the next, if need be.

        Returns:
            The program, which takes the parameters, a cache, tokens, `start` and `last` as
            `Decoder.read` does, and what the random key is made of.
        """
        if (rows, length) in self._read:
            return self._read[rows, length]
        decoder, sampling, places = self._decoder, self._sampling, self._places
        cache = jax.eval_shape(lambda: decoder.cache(rows))
        of_cache: dict[str, Any] = {}
        of_read: dict[str, Any] = {}
        if places is not None:
            where = jax.tree.map(lambda leaf: places.cache(leaf.shape), cache)
            cache = jax.tree.map(
                lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
                cache,
                where,
            )
            of_cache, of_read = {"out_shardings": where}, {"out_shardings": (places.whole, where)}

        def read(params: Any, cache: Any, tokens: Any, start: Any, last: Any, own: Any) -> Any:
            logits, cache = decoder.read(params, cache, tokens, start, last)
            key = jax.random.fold_in(jax.random.key(own[0]), own[1])
            return draw(logits, key, sampling), cache

        def compile_read() -> Any:
            row = np.zeros(rows, np.int32)
            tokens, own = np.zeros((rows, length), np.int32), np.zeros(2, np.uint32)
            program = jax.jit(read, donate_argnums=1, **of_read)
            return program.lower(params, cache, tokens, row, row, own).compile()

        if rows not in self._empty:
            empty = jax.jit(lambda: decoder.cache(rows), **of_cache)
            self._empty[rows] = self._compiler.submit(lambda: empty.lower().compile())
        self._read[rows, length] = self._compiler.submit(compile_read)
        return self._read[rows, length]
