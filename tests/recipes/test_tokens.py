"""`tokens`: rows of token files, packing, exact resume and the text of every refusal."""

from types import SimpleNamespace

import numpy as np
import pytest

from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.recipes import InputError, build_dataset, check_dataset
from launcher.recipes.data.corpus.files import CorpusMeta, TokenPart, find_corpus, write_meta
from launcher.recipes.datasets.mixture import Mixture
from launcher.recipes.datasets.text import Text
from launcher.recipes.datasets.tokens import Tokens
from launcher.train.feed import own_rows, shapes_of

LENGTH = 4


def model(**changes):
    return SimpleNamespace(
        **{"name": "gpt", "vocab_size": 1000, "sequence_length": LENGTH, **changes}
    )


def refusal(options, model_options=None, validation=False):
    with pytest.raises(InputError) as error:
        check_dataset(options, model_options or model(), validation=validation)
    assert "\n" not in str(error.value)
    return str(error.value)


def written(path, tokens, dtype="uint16"):
    np.asarray(tokens, dtype).tofile(path)
    return path


def rows_of(batches, number):
    return sorted(
        (*tokens, targets[-1])
        for k in range(number)
        for batch in [batches(k)]
        for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True)
    )


def test_rows_lie_one_behind_the_other_also_across_files(tmp_path):
    for index, (start, stop) in enumerate([(0, 7), (7, 8), (8, 23)]):
        written(tmp_path / f"{index}.bin", np.arange(start, stop))
    options = Tokens(path=str(tmp_path / "*.bin"), validation_fraction=0.0)
    dataset = build_dataset(options, model(), 5, seed=0)
    # 23 tokens hold five rows of 4 + 1 that share one; the rest is left out.
    assert rows_of(dataset.train, 1) == [tuple(range(k, k + 5)) for k in range(0, 20, 4)]
    assert set(dataset.train(0)) == {"tokens", "targets"}
    assert dataset.train(0)["tokens"].dtype == np.int32
    assert dataset.validation is None
    assert dataset.describe == (
        f"dataset.path={tmp_path}/*.bin: 3 files, 23 tokens; 5 examples, none held out"
    )


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64", ">u4"])
def test_npy_files_say_their_type(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.arange(900, 921).astype(dtype))
    dataset = build_dataset(Tokens(path=str(tmp_path), validation_fraction=0.0), model(), 5, 0)
    assert rows_of(dataset.train, 1) == [tuple(range(k, k + 5)) for k in range(900, 920, 4)]


def test_the_last_tokens_are_held_out_or_another_file(tmp_path):
    train, val = written(tmp_path / "t.bin", np.arange(100)), written(tmp_path / "v.bin", [7] * 9)
    dataset = build_dataset(Tokens(path=str(train), validation_fraction=0.2), model(), 4, 0)
    assert max(max(row) for row in rows_of(dataset.train, 10)) < 80
    assert min(min(row) for row in rows_of(dataset.validation, 1)) >= 80
    options = Tokens(path=str(train), validation_path=str(val), packing="documents", end_token=9)
    held = build_dataset(options, model(), 4, 0).validation
    assert rows_of(held, 1) == [(7,) * 5] * 2
    assert {array.shape for array in held(1).values()} == {(0, 4)}  # none is left


def test_batches_are_pure_and_processes_make_their_own_rows(tmp_path):
    path = written(tmp_path / "a.bin", np.arange(161))
    options = Tokens(path=str(path), validation_fraction=0.0)
    one = build_dataset(options, model(), 8, seed=1).train
    other = build_dataset(options, model(), 8, seed=1).train
    shapes = shapes_of(other, 8)
    parts = [own_rows(other, shapes, np.arange(4)), own_rows(other, shapes, np.arange(4, 8))]
    for k in (13, 2, 7):  # 40 rows: also beyond the first pass
        halves = [part(k) for part in parts]
        for name, array in one(k).items():
            np.testing.assert_array_equal(array, halves[0][name] + halves[1][name])


def test_packed_rows_keep_documents_apart(tmp_path):
    path = written(tmp_path / "a.bin", [1, 2, 9, 3, 9, 4, 5, 6, 7])
    options = Tokens(path=str(path), packing="documents", end_token=9, validation_fraction=0.0)
    batch = build_dataset(options, model(sequence_length=8), 1, 0).train(0)
    assert {name: array[0].tolist() for name, array in batch.items()} == {
        "tokens": [1, 2, 9, 3, 9, 4, 5, 6],
        "targets": [2, 9, 3, 9, 4, 5, 6, 7],
        "segments": [1, 1, 1, 2, 2, 3, 3, 3],
        "positions": [0, 1, 2, 0, 1, 0, 1, 2],
        "weights": [1, 1, 0, 1, 0, 1, 1, 1],
    }
    assert {array.dtype.name for array in batch.values()} == {"int32", "float32"}


def test_a_prepared_folders_file_has_the_folders_type(tmp_path):
    part = TokenPart("00000", "", 41, 1, 0, "", "")
    kind = np.dtype("<u4")
    write_meta(tmp_path, CorpusMeta("t", "", 70000, None, kind, False, "", "", (part,), ""))
    written(tmp_path / "00000.bin", np.arange(100, 141), kind)
    written(tmp_path / "00000.ends", [41], np.int64)
    options = Tokens(path=str(tmp_path / "*.bin"), validation_fraction=0.0)
    batch = build_dataset(options, model(), 10, 0).train(0)
    assert sorted(batch["tokens"].ravel()) == list(range(100, 140))
    ends = find_corpus(str(tmp_path)).access.array(tmp_path / "00000.ends")
    assert isinstance(ends, np.memmap)  # there may be more than memory holds


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("talks.jsonl", "task=prepare_data dataset=jsonl, and name the folder that this writes"),
        ("a.parquet", "task=prepare_data dataset=parquet, and name"),
        ("a.txt", "task=prepare_data dataset=documents dataset.format=text, and name"),
        ("meta.pkl", "name a folder that task=prepare_data wrote, or .bin or .npy files of tokens"),
    ],
)
def test_a_file_of_another_kind_is_never_read_as_tokens(tmp_path, name, remedy):
    (tmp_path / name).write_bytes(b'{"text": "a"}\n' * 20)
    written(tmp_path / "b.bin", np.arange(100))
    anything = model(vocab_size=70000)
    for path in (tmp_path / name, tmp_path / "*"):
        said = refusal(Tokens(path=str(path)), anything)
        assert said.startswith(f"dataset.path={path}: {tmp_path / name} is not a token file; ")
        assert remedy in said
    mixture = Mixture(parts={"web": {"path": str(tmp_path / name)}})
    assert refusal(mixture, anything).startswith(f"dataset.parts.web.path={tmp_path / name}: ")
    held = Tokens(path=str(tmp_path / "b.bin"), validation_path=str(tmp_path / name))
    assert refusal(held, anything).startswith(f"dataset.validation_path={tmp_path / name}: ")


def test_a_token_out_of_the_vocabulary_is_named_with_file_and_position(tmp_path):
    written(tmp_path / "a.bin", np.arange(10))
    written(tmp_path / "b.bin", [*range(10), 1000, 0])
    batches = build_dataset(Tokens(path=str(tmp_path)), model(), 5, 0).train
    with pytest.raises(InputError) as error:
        batches(0)
    assert str(error.value) == (
        f"{tmp_path / 'b.bin'}: token 10 is 1000, which is outside model.vocab_size=1000; "
        "enlarge that, check dataset.dtype and the file, or leave such examples out with "
        "dataset.bad=skip"
    )


def test_the_next_good_row_stands_in_for_one_with_a_token_out_of_the_vocabulary(tmp_path, caplog):
    tokens = np.arange(41)  # ten rows
    tokens[[8, 20, 38]] = 1000  # rows share them: in rows 1 and 2, 4 and 5, and 9
    written(tmp_path / "a.bin", tokens)
    given = Tokens(path=str(tmp_path), bad="skip", validation_fraction=0.0)
    train = build_dataset(given, model(), 10, 0).train
    rows = [(4 * i, *range(4 * i + 1, 4 * i + 5)) for i in range(10)]
    rows[1] = rows[2] = rows[3]
    rows[4] = rows[5] = rows[6]
    rows[9] = rows[0]
    assert rows_of(train, 1) == sorted(rows)
    train(1)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3  # the first, the second and the fourth of five
    assert "bad examples so far in this process: 4" in told[2]
    later = build_dataset(given, model(), 10, 0).train  # as another process, which begins later
    wanted = train(2)
    parts = [own_rows(later, shapes_of(later, 10), np.arange(a, a + 5))(2) for a in (0, 5)]
    for name, array in wanted.items():
        np.testing.assert_array_equal(sum(part[name] for part in parts), array)
    written(tmp_path / "a.bin", [1000] * 41)
    with pytest.raises(InputError, match="tried 10 examples from there on and found no good one"):
        build_dataset(given, model(), 10, 0).train(0)


def test_a_file_that_is_cut_short_while_it_is_read_is_named(tmp_path):
    path = written(tmp_path / "a.bin", np.arange(21))
    batches = build_dataset(Tokens(path=str(path), validation_fraction=0.0), model(), 5, 0).train
    written(path, np.arange(9))
    with pytest.raises(InputError, match=r"a\.bin ends before token .*: it was cut short"):
        batches(0)


def test_refuses_files_that_hold_no_tokens(tmp_path):
    path = tmp_path / "none.bin"
    remedy = "name a folder that task=prepare_data wrote, or .bin or .npy files of tokens"
    assert refusal(Tokens(path=str(path))) == f"dataset.path={path} does not exist; {remedy}"
    path.touch()
    assert refusal(Tokens(path=str(path))) == (
        f"dataset.path={path} holds no tokens ({path} is empty); {remedy}"
    )
    path.write_bytes(b"123")
    assert refusal(Tokens(path=str(path))) == (
        f"dataset.path={path}: {path} holds 3 bytes, which is not a whole number of uint16 tokens; "
        "it was cut short, or dataset.dtype is another"
    )
    other = tmp_path / "a.npy"
    np.save(other, np.zeros(30))
    assert refusal(Tokens(path=str(other))) == (
        f"dataset.path={other}: {other} holds float64 [30]; tokens are integers in one dimension"
    )
    np.save(other, np.zeros(30, np.uint16))
    assert "not dataset.dtype=uint32" in refusal(Tokens(path=str(other), dtype="uint32"))
    other.write_bytes(other.read_bytes()[:-1])
    assert "is not a whole .npy file" in refusal(Tokens(path=str(other)))
    header = np.lib.format.magic(1, 0) + b"\x0a\x00"
    for bad in (b"nothing", b"", b"PK\3\4 a zip", header + b"{'descr': (", header + b"((((((((((",
                np.lib.format.magic(1, 0) + b"\xff\x7f" + b" " * 2**15):  # fmt: skip
        other.write_bytes(bad)
        said = refusal(Tokens(path=str(other)))
        assert "is not a whole .npy file (" in said
        assert "pickle" not in said
    np.save(other, np.array([{}, 1]), allow_pickle=True)
    assert "holds object [2]; tokens are integers" in refusal(Tokens(path=str(other)))


def test_refuses_what_does_not_fit_the_model_or_holds_too_little(tmp_path):
    path = written(tmp_path / "a.bin", range(20))
    whole = Tokens(path=str(path), validation_fraction=0.1)
    assert refusal(whole, SimpleNamespace(name="mlp")) == (
        "dataset.name=tokens holds tokens, which model.name=mlp does not take; choose model=gpt or "
        "dataset=synthetic"
    )
    assert refusal(whole, model(sequence_length=20)) == (
        f"dataset.path={path} holds 18 tokens for training, less than one example of 20 + 1 "
        "tokens; give more, or lower model.sequence_length"
    )
    assert refusal(whole, validation=True) == (
        f"dataset.validation_fraction=0.1 of dataset.path={path} holds out no example of 4 + 1 "
        "tokens to evaluate on; raise it, name held-out tokens with dataset.validation_path, or "
        "set train.eval_every=0"
    )
    assert refusal(Tokens(path=str(path), packing="documents")) == (
        f"dataset.path={path} does not say where documents end; set dataset.end_token (GPT-2's is "
        "50256), or prepare the corpus with task=prepare_data"
    )


def test_a_model_that_fills_in_gets_rows_of_which_some_tokens_are_masked(tmp_path):
    tokens = np.arange(1, 61)
    path = written(tmp_path / "a.bin", tokens)
    fills_in = model(sequence_length=12, mask_every=4)
    for options in (
        Tokens(path=str(path), validation_fraction=0.3),
        Mixture(parts={"a": {"path": str(path)}}, validation_fraction=0.3),
    ):
        dataset = build_dataset(options, fills_in, 2, seed=0)
        for batch in (dataset.train(0), dataset.validation(0)):
            is_masked = batch["weights"] > 0
            assert (is_masked.sum(-1) == 3).all()
            assert (batch["tokens"][is_masked] == 999).all()
            np.testing.assert_array_equal(batch["tokens"][~is_masked], batch["targets"][~is_masked])
            assert (np.diff(batch["targets"]) == 1).all()
    text = tmp_path / "a.txt"
    text.write_bytes(bytes(range(1, 61)))
    batch = build_dataset(Text(path=str(text)), fills_in, 2, seed=0).train(0)
    assert (batch["weights"].sum(-1) == 3).all()


def test_packing_is_refused_for_a_model_that_attends_to_all_of_a_row(tmp_path):
    path = written(tmp_path / "a.bin", range(60))
    words = [
        *("model=bert", "dataset=tokens", f"dataset.path={path}", "dataset.end_token=0"),
        "dataset.packing=documents",
    ]
    with pytest.raises(ConfigError) as error:
        load(words)
    assert str(error.value) == (
        "model=bert attends to all of a row, also where dataset.packing=documents packs several "
        "documents into one (on the command line). Use dataset.packing=stream, or model=gpt, llama "
        "or moe."
    )
