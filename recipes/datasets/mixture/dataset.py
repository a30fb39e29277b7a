"""A mixture of corpora: each row is of one of them, in the proportion of their weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from launcher.recipes import Batch, Batches, Dataset, InputError, Tokenizer
from launcher.recipes.data.batches import held_out
from launcher.recipes.data.corpus.files import CorpusMeta, find_corpus
from launcher.recipes.data.corpus.rows import RowMaker, rows_between
from launcher.recipes.data.masking import Gather, as_the_model_takes
from launcher.recipes.datasets.mixture import Mixture
from launcher.recipes.datasets.tokens import Tokens
from launcher.recipes.datasets.tokens import dataset as tokens

_MOST = 2**40  # rows of a part


class _MixedPart(NamedTuple):
    """One corpus: its name and weight, its rows for training and held out, what makes them, a mask.

    The mask is that of the tokenizer that made its tokens; None: it has none. Last come, in words,
    the files that are not read.
    """

    name: str
    weight: float
    train: int
    held: int
    makers: tuple[RowMaker, RowMaker]
    mask_token: int | None
    left_out: str


def check(options: Mixture, model_options: Any, validation: bool) -> None:
    """Refuse a mixture of which a part cannot be used; raises InputError.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        validation: whether the run evaluates.
    """
    check_tokenizers(options)
    parts = list(_parts(options, model_options))
    if validation and not any(part.held for part in parts):
        raise InputError(
            f"dataset.validation_fraction={options.validation_fraction} of dataset.parts holds out "
            "no example to evaluate on; raise it, or set train.eval_every=0"
        )


def build(options: Mixture, model_options: Any, global_batch_size: int, seed: int) -> Dataset:
    """Return batches of all parts; held out is what each part holds out.

    Args:
        options: the dataset's settings.
        model_options: the model's settings.
        global_batch_size: the samples of a batch.
        seed: picks the order of the training data.
    """
    parts = list(_parts(options, model_options))
    held = [part.held for part in parts]
    masks = (part.mask_token for part in parts)  # all made by one tokenizer, where known
    mask = next((mask for mask in masks if mask is not None), None)
    train, gather = (
        as_the_model_takes(model_options, _gather([part.makers[i] for part in parts], counts), mask)
        for i, counts in enumerate(([part.train for part in parts], held))
    )

    def after(taken: Mapping[str, int]) -> Batches:
        return Batches(_mixed(parts, global_batch_size, seed, taken), train, a_sample=0)

    total = sum(part.weight for part in parts)
    shares = ", ".join(
        f"{part.name} {part.weight / total:.0%} of {part.train:,} examples" for part in parts
    )
    end = f"{sum(held):,} examples held out for validation" if any(held) else "none held out"
    return Dataset(
        train=after({}),
        validation=held_out(sum(held), global_batch_size, gather),
        describe=f"a mixture: {shares}; {end}{''.join(part.left_out for part in parts)}",
        after=after,
    )


def rows_taken(
    options: Mixture, before: Mapping[str, Any], data: str, rows: int, taken: Mapping[str, int]
) -> dict[str, int]:
    """Return how many rows of each part were taken; of one whose tokens are others, none.

    The other arguments are those of `launcher.recipes.rows_taken`.
    """
    parts = before["parts"]
    counts = _counts([part.get("weight", 1) for part in parts.values()], rows)
    total = {**taken, **{n: taken.get(n, 0) + c for n, c in zip(parts, counts, strict=True)}}
    theirs = dict(zip(parts, data.split(" "), strict=True))
    ours = dict(zip(options.parts, fingerprint(options).split(" "), strict=True))
    return {n: 0 if ours.get(n, theirs.get(n)) != theirs.get(n) else c for n, c in total.items()}


def _counts(weights: Sequence[float], rows: int) -> list[int]:
    """Return how many of the first `rows` rows of a mixture are of each part."""
    import grain

    parts = [grain.MapDataset.range(n * _MOST, (n + 1) * _MOST) for n in range(len(weights))]
    order, found = grain.MapDataset.mix(parts, weights), dict[int, int]()
    while len(found) < len(weights):
        # The next row of a part tells of those before.
        part, before = divmod(int(order[rows]), _MOST)
        found.setdefault(part, before)
        rows += 1
    return [found[n] for n in range(len(weights))]


def fingerprint(options: Mixture) -> str:
    """Return a digest of the tokens of all parts."""
    return " ".join(tokens.fingerprint(_tokens(options, part)) for part in options.parts.values())


def bytes_per_target(options: Mixture, model_options: Any, rows: int) -> float | None:
    """Return the mean bytes of text of a held-out target; None where a part does not know them."""
    total, left = 0.0, rows
    for part in _parts(options, model_options):
        own, one = min(left, part.held), _tokens(options, options.parts[part.name])
        size = tokens.bytes_per_target(one, model_options, own) if own else 0.0
        if size is None:
            return None
        total, left = total + own * size, left - own
    return total / rows


def tokenizer(options: Mixture) -> Tokenizer:
    """Return the tokenizer of all parts; raises InputError where they have not the same."""
    check_tokenizers(options)
    found = [tokens.tokenizer(_tokens(options, part)) for part in options.parts.values()]
    return found[0]


def check_tokenizers(options: Mixture) -> None:
    """Raise InputError if parts are known to be made by different tokenizers."""
    first: tuple[str, CorpusMeta] | None = None
    for name, part in options.parts.items():
        key = f"dataset.parts.{name}.path"
        meta = find_corpus(part["path"], options.dtype, key, options).meta
        if meta is None:
            continue
        if first is not None and first[1].tokenizer_fingerprint != meta.tokenizer_fingerprint:
            others, theirs = first
            raise InputError(
                f"dataset.parts.{others} was made by the tokenizer {theirs.tokenizer} "
                f"({theirs.vocab_size:,} tokens) and dataset.parts.{name} by {meta.tokenizer} "
                f"({meta.vocab_size:,} tokens), which is a different one; prepare both "
                "with the same, with task=prepare_data"
            )
        first = first or (name, meta)


def _mixed(
    parts: Sequence[_MixedPart], batch_size: int, seed: int, taken: Mapping[str, int]
) -> Callable[[int], np.ndarray]:
    """Return a function from k to the sample numbers of batch k.

    Those of a part follow those of the parts before it. Each part is shuffled anew for each pass
    over it, and passes over the parts end at different times. Each begins after the rows that were
    taken of it, and keeps its order where parts were added or left out since.
    """

    @functools.cache
    def mixed() -> Any:
        import grain  # here: as in `launcher.recipes.data.batches`

        starts = [0, *itertools.accumulate(part.train for part in parts)]
        # Parts of one size must not have one order.
        names = list(dict.fromkeys((*taken, *(part.name for part in parts))))
        seeds = np.random.SeedSequence(seed).generate_state(len(names))
        passes = [
            grain.MapDataset.range(start, start + part.train)
            .seed(int(seeds[names.index(part.name)]))
            .shuffle()
            .repeat()[taken.get(part.name, 0) :]
            for start, part in zip(starts, parts, strict=False)
        ]
        return grain.MapDataset.mix(passes, [part.weight for part in parts]).batch(batch_size)

    return lambda k: mixed()[k]


def _parts(options: Mixture, model_options: Any) -> Iterator[_MixedPart]:
    for name, part in options.parts.items():
        one = _tokens(options, part)
        ranges = tokens.find_ranges(one, model_options, f"dataset.parts.{name}.path")
        length = model_options.sequence_length
        yield _MixedPart(
            name,
            part.get("weight", 1),
            rows_between(0, ranges.train_stop, length),
            rows_between(ranges.validation_start, ranges.validation.count, length),
            tokens.row_makers(one, model_options, ranges),
            ranges.mask_token,
            ranges.train.left_out,
        )


def _tokens(options: Mixture, part: dict[str, Any]) -> Tokens:
    return Tokens(
        path=part["path"],
        dtype=options.dtype,
        packing=options.packing,
        end_token=options.end_token,
        bad=options.bad,
        validation_fraction=options.validation_fraction,
        objects=options.objects,
        cache_gib=options.cache_gib,
    )


def _gather(makers: Sequence[RowMaker], counts: Sequence[int]) -> Gather:
    """Return what makes rows of all parts, in the order of their numbers."""
    starts = np.array([0, *itertools.accumulate(counts)], np.int64)
    masked = any(maker.masked for maker in makers)
    makers = [replace(maker, masked=masked) for maker in makers]  # all have weights, or none

    def gather(which: np.ndarray) -> Batch:
        part = np.searchsorted(starts, which, "right") - 1
        rows: Batch = {}
        for index in np.unique(part):
            own = np.flatnonzero(part == index)
            for name, array in makers[index](which[own] - starts[index]).items():
                whole = rows.setdefault(name, np.zeros((len(which), *array.shape[1:]), array.dtype))
                whole[own] = array
        return rows

    return gather
