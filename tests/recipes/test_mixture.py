"""`mixture`: proportions, purity, and batches after resumes on other hosts."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launcher.recipes import InputError, build_dataset, check_dataset
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.documents.prepare import prepare_corpus, train_tokenizer
from launcher.recipes.datasets.mixture import Mixture
from launcher.train.feed import Feeder, own_rows, shapes_of

MODEL = SimpleNamespace(name="gpt", vocab_size=400, sequence_length=16)


def tokens_at(folder, first, count=400):
    np.arange(first, first + count, dtype=np.uint16).tofile(folder / f"{first}.bin")
    return str(folder / f"{first}.bin")


def mixture(folder, **changes):
    parts = {
        "a": {"path": tokens_at(folder, 0), "weight": 3},
        "b": {"path": tokens_at(folder, 1000, 200)},
    }
    return Mixture(**{"parts": parts, "validation_fraction": 0.1, **changes})


def test_rows_come_by_their_weights_and_each_part_is_shuffled_anew(tmp_path):
    model = SimpleNamespace(name="gpt", vocab_size=2000, sequence_length=4)
    check_dataset(mixture(tmp_path), model, validation=True)
    dataset = build_dataset(mixture(tmp_path), model, 8, seed=0)
    first = np.concatenate([dataset.train(k)["tokens"][:, 0] for k in range(60)])
    of_a = first[first < 1000]
    assert abs(len(of_a) / len(first) - 0.75) < 0.01
    rows = (400 - 40 - 1) // 4
    assert sorted(of_a[:rows]) == sorted(of_a[rows : 2 * rows]) == list(range(0, 4 * rows, 4))
    assert list(of_a[:rows]) != list(of_a[rows : 2 * rows])
    held = np.concatenate([dataset.validation(k)["tokens"].ravel() for k in range(2)])
    assert set(held // 1000) == {0, 1}
    assert min(held) >= 360
    assert dataset.describe == (
        "a mixture: a 75% of 89 examples, b 25% of 44 examples; 13 examples held out for validation"
    )


def test_a_batch_depends_on_the_seed_and_its_number_alone(tmp_path):
    model = SimpleNamespace(name="gpt", vocab_size=2000, sequence_length=4)
    one, other = (build_dataset(mixture(tmp_path), model, 8, seed=3).train for _ in range(2))
    forwards = [one(k)["tokens"].tolist() for k in range(30)]
    assert [other(k)["tokens"].tolist() for k in reversed(range(30))] == forwards[::-1]
    assert build_dataset(mixture(tmp_path), model, 8, 4).train(0)["tokens"].tolist() != forwards[0]


def test_refuses_parts_that_cannot_be_used(tmp_path):
    def errors(parts):
        return [str(e) for e in Mixture(parts=parts).check(MODEL)]

    assert "dataset.parts names nothing" in errors({})[0]
    assert "dataset.parts.a names no path" in errors({"a": 3})[0]
    assert "dataset.parts.a.wait is not a setting" in errors({"a": {"path": "x", "wait": 2}})[0]
    assert (
        "dataset.parts.a.weight=0 must be a number above 0"
        in (errors({"a": {"path": "x", "weight": 0}})[0])
    )
    with pytest.raises(InputError, match=r"^dataset\.parts\.b\.path=none does not exist"):
        check_dataset(Mixture(parts={"b": {"path": "none"}}), MODEL, validation=False)


@pytest.fixture
def prepared(tmp_path):
    """A mixture of two corpora in Parquet files, tokenised by a trained tokenizer, packed."""
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(50)]
    parts = {}
    for name in ("a", "b"):
        texts = [" ".join(rng.choice(words, rng.integers(2, 30))) for _ in range(150)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet", row_group_size=40)
    tokenizer = str(tmp_path / "tokenizer.json")
    for name in ("a", "b"):
        source, out = str(tmp_path / f"{name}.parquet"), str(tmp_path / name)
        if name == "a":
            train_tokenizer(Documents(path=source, format="parquet"), 400, Path(tokenizer))
        options = Documents(path=source, format="parquet", tokenizer=tokenizer, tokens=out)
        prepare_corpus(options, 1)
        parts[name] = {"path": out, "weight": {"a": 2, "b": 1}[name]}
    return Mixture(parts=parts, packing="documents")


def test_batches_after_three_resumes_on_other_hosts_are_those_of_an_undisturbed_run(prepared):
    undisturbed = build_dataset(prepared, MODEL, 8, seed=5).train
    wanted = [undisturbed(k) for k in range(40)]
    assert set(wanted[0]) == {"tokens", "targets", "segments", "positions", "weights"}
    seen, start = [], 0
    for hosts, stop in ((1, 7), (2, 19), (4, 28), (1, 40)):
        rows = np.array_split(np.arange(8), hosts)
        made = []  # each host builds the dataset anew, as a process that has just started does
        for own in rows:
            batches = build_dataset(prepared, MODEL, 8, seed=5).train
            feeder = Feeder(own_rows(batches, shapes_of(batches, 8), own), start, stop)
            made.append([feeder.get(k)[0] for k in range(start, stop)])
            feeder.close()
        for parts in zip(*made, strict=True):
            seen.append(
                {
                    name: np.concatenate([p[name][own] for p, own in zip(parts, rows, strict=True)])
                    for name in parts[0]
                }
            )
        start = stop
    for k, (batch, one) in enumerate(zip(seen, wanted, strict=True)):
        for name, array in one.items():
            assert batch[name].tobytes() == array.tobytes(), (k, name)


def test_a_tokenizer_of_another_vocabulary_is_refused(prepared):
    small = SimpleNamespace(name="gpt", vocab_size=300, sequence_length=16)
    with pytest.raises(InputError) as error:
        check_dataset(prepared, small, validation=False)
    path = prepared.parts["a"]["path"]
    meta = json.loads(Path(path, "meta.json").read_text())
    assert str(error.value) == (
        f"dataset.parts.a.path={path}, made by {meta['tokenizer']}, has {meta['vocab_size']} "
        "tokens, more than model.vocab_size=300; "
        f"set model.vocab_size={meta['vocab_size']} or more"
    )


def test_parts_of_different_tokenizers_are_refused_with_both_named(prepared, tmp_path):
    source, out = str(tmp_path / "a.parquet"), str(tmp_path / "c")
    prepare_corpus(Documents(path=source, format="parquet", tokens=out), 1)
    mixed = Mixture(parts={**prepared.parts, "c": {"path": out}}, packing="documents")
    with pytest.raises(InputError) as error:
        check_dataset(mixed, MODEL, validation=False)
    assert str(error.value) == (
        f"dataset.parts.a was made by the tokenizer {tmp_path / 'tokenizer.json'} (301 tokens) and "
        "dataset.parts.c by bytes (257 tokens), which is a different one; prepare both with "
        "the same, with task=prepare_data"
    )
