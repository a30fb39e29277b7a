"""Interfaces of models and datasets, and the error of input that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax
    import numpy as np

Batch = dict[str, "np.ndarray"]


class InputError(ValueError):
    """Settings or files that cannot be used. Its one line says what, which key and what to do."""


class Model(NamedTuple):
    """A model as two pure functions.

    Attributes:
        init: takes a random key and returns the parameters, a pytree of float32 arrays; with state,
            `(parameters, state)`.
        loss: takes the parameters, with state also the state, a batch and a random key for dropout,
            None to switch that off (evaluation); returns the mean loss over the batch, a float32
            scalar, and a dict of further scalars, `(loss, metrics)`; with state,
            `(loss, (metrics, state))`. A loss that is a mean over something else than rows, such as
            the tokens that a mask leaves, gives their number as the metric `weight`.
        has_state: whether the model has state, a pytree of arrays that training changes without
            gradients: the running averages of batch normalization, counters. The state that `loss`
            returns has the structure, shapes and dtypes of the one it was given, and is the next
            step's; an evaluation does not change it.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[..., tuple[jax.Array, Any]]
    has_state: bool = False


@dataclass(frozen=True)
class Batches:
    """Numbered batches of rows that can be made apart; called with k, it returns batch k.

    Each process makes the rows of a batch that its devices need, and no others.

    Attributes:
        numbers: returns the sample numbers of batch k, int64 [rows], a pure function of k.
        gather: makes the rows of these sample numbers, one or more of them in any order.
        num_rows: the rows of all batches together, of which the last may hold fewer than the
            others, and those after it none; None where there is no end to them.
        a_sample: a sample number, whose row shows the shapes of all; None: the first of batch 0.
    """

    numbers: Callable[[int], np.ndarray]
    gather: Callable[[np.ndarray], Batch]
    num_rows: int | None = None
    a_sample: int | None = None

    def __call__(self, k: int) -> Batch:
        """Return batch k."""
        return self.gather(self.numbers(k))


class Dataset(NamedTuple):
    """Batches addressed by number, as functions or as `Batches`.

    A function makes whole batches, in every process. `launcher.recipes.data.batches` has functions
    that return `Batches`.

    Attributes:
        train: returns batch k, a pure function of the seed and k, for every k >= 0; each pass over
            the data has an order of its own.
        validation: does the same for held-out data, in an order that does not depend on the seed;
            None where nothing is held out. A batch with fewer rows than `global_batch_size`, or
            with none, is the last one.
        describe: one line that says what the data is.
        after: takes how many rows of each source were taken before, and returns what `train` is
            after these; None: there is one source, whose rows follow one another.
    """

    train: Callable[[int], Batch]
    validation: Callable[[int], Batch] | None
    describe: str
    after: Callable[[Mapping[str, int]], Callable[[int], Batch]] | None = None


class Tokenizer(NamedTuple):
    """What turns text into tokens and back.

    Attributes:
        encode: texts to tokens, an integer array each, without tokens at either end.
        place: a text to its tokens, as `encode` has them, and where in the text each of them begins
            and ends, in characters, three integer arrays.
        decode: tokens to text; a token that it does not have stands as U+FFFD.
        vocab_size: all tokens are smaller.
        end_token: what is put behind each document; None: nothing.
        fingerprint: a digest of what it is made of.
        templates: how messages become text, in Jinja, by name; `default` is the usual one.
        special: special tokens by their roles, such as `bos_token`, for those templates.
        mask_token: the mask for tokens to be filled in, if any.
        begin: the tokens that are put before each document.
        end: those that are put behind it, but for `end_token`.
    """

    encode: Callable[[Sequence[str]], list[np.ndarray]]
    place: Callable[[str], tuple[np.ndarray, np.ndarray, np.ndarray]]
    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    end_token: int | None
    fingerprint: str
    templates: dict[str, str] = {}  # noqa: RUF012 (never changed)
    special: dict[str, str] = {}  # noqa: RUF012 (never changed)
    mask_token: int | None = None
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that is to be continued: it begins as a document does."""
        tokens: list[int] = self._begun(self.encode([text])[0]).tolist()
        return tokens

    def document(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens of a document from those of its text.

        They begin and end as `transformers` has it for the tokenizer, and then with the end token.
        None stands there twice: a text may bring them.
        """
        return self.ended(self._begun(tokens), self.end)

    def ended(self, tokens: np.ndarray, ends: tuple[int, ...] = ()) -> np.ndarray:
        """Return tokens with `ends` and the end token behind them, if they do not end so already.

        Blanks may follow there, as behind the end of a turn.
        """
        import numpy as np  # here: settings are checked without it

        if self.end_token is not None and self.end_token not in ends:
            ends = (*ends, self.end_token)
        places = np.flatnonzero(tokens == (ends[-1] if ends else -1))
        has = len(places) and not self.decode(tokens[places[-1] + 1 :].tolist()).strip()
        return tokens if has else np.concatenate([tokens, np.array(ends, np.int64)])

    def _begun(self, tokens: np.ndarray) -> np.ndarray:
        import numpy as np

        begin = list(self.begin)
        return tokens if tokens[: len(begin)].tolist() == begin else np.concatenate([begin, tokens])
