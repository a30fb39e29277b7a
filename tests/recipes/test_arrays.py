"""`arrays`: the file's rows, held out and in order as asked, or one clear refusal."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from launcher.recipes import InputError, build_dataset, check_dataset
from launcher.recipes.datasets.arrays import Arrays

MLP = SimpleNamespace(name="mlp", input_size=3, output_size=2)
GPT = SimpleNamespace(name="gpt", vocab_size=7, sequence_length=4)
OTHER = SimpleNamespace(name="mine.net")
X = np.arange(60.0).reshape(20, 3)
Y = X[:, :2] + 0.5
TOKENS = np.arange(80).reshape(20, 4) % 7


@pytest.fixture
def file(tmp_path):
    def made(**arrays):
        np.savez(tmp_path / "x.npz", **arrays)
        return str(tmp_path / "x.npz")

    return made


def rows(batches, numbers, name="x"):
    return np.concatenate([batches(k)[name] for k in numbers])


def test_rows_come_in_order_pass_after_pass_and_the_last_are_held_out(file):
    options = Arrays(path=file(x=X, y=Y, other=np.ones(3)), shuffle=False, validation_fraction=0.25)
    check_dataset(options, MLP, validation=True)
    dataset = build_dataset(options, MLP, 6, 0)
    assert set(dataset.train(0)) == {"x", "y"}
    np.testing.assert_array_equal(rows(dataset.train, range(5)), X[np.arange(30) % 15])
    np.testing.assert_array_equal(rows(dataset.train, range(5), "y"), Y[np.arange(30) % 15])
    np.testing.assert_array_equal(dataset.validation(0)["x"][:5], X[15:])
    assert dataset.train(0)["x"].dtype == np.float32
    assert dataset.describe == (
        f"{options.path}: 20 examples of x and y, in their order, the last 5 held out for "
        "validation"
    )


def test_shuffled_rows_are_a_pure_function_of_the_seed(file):
    options = Arrays(path=file(x=X, y=Y), validation_fraction=0.0)
    one, again, other = (build_dataset(options, MLP, 10, seed) for seed in (3, 3, 4))
    assert one.validation is None
    for name in ("x", "y"):
        np.testing.assert_array_equal(one.train(7)[name], again.train(7)[name])
    first = rows(one.train, range(2))
    assert sorted(map(tuple, first)) == sorted(map(tuple, X))
    assert not np.array_equal(first, rows(other.train, range(2)))
    assert not np.array_equal(first, X)
    np.testing.assert_array_equal(one.train(0)["y"], one.train(0)["x"][:, :2] + 0.5)


def test_a_model_takes_what_its_settings_say_or_all_or_what_is_named(file):
    assert set(build_dataset(Arrays(path=file(a=X, b=Y)), OTHER, 4, 0).train(0)) == {"a", "b"}
    named = Arrays(path=file(a=X, b=np.ones(3)), names=["a"])
    assert set(build_dataset(named, MLP, 4, 0).train(0)) == {"a"}
    batch = build_dataset(Arrays(path=file(tokens=TOKENS, targets=TOKENS)), GPT, 4, 0).train(0)
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("model", "arrays", "text"),
    [
        (MLP, {}, "holds no array; write one with numpy.savez(path, x=x, y=y)"),
        (MLP, {"x": X}, "has no array 'y', which model.name=mlp takes; it has x: save it under"),
        (MLP, {"x": X, "Y": Y}, "has no array 'y', which model.name=mlp takes; it has Y, x: save"),
        (
            MLP,
            {"x": X, "y": Y[:-1]},
            ": its arrays have different numbers of examples (x 20, y 19); a row of each is one",
        ),
        (MLP, {"x": X[:0], "y": Y[:0]}, ": its arrays have no examples; save at least one"),
        (MLP, {"x": X, "y": np.array("a")}, ": 'y' is of type <U1; it must hold numbers"),
        (MLP, {"x": X, "y": np.ones(())}, ": 'y' is one number; it must have a row for each"),
        (
            MLP,
            {"x": X, "y": Y[:, :1]},
            ": 'y' has the shape [20, 1], and the model takes [examples, 2]; set model.output_",
        ),
        (GPT, {"tokens": TOKENS, "targets": TOKENS * 1.0}, ": 'targets' is of type float64; the"),
        (
            GPT,
            {"tokens": TOKENS, "targets": TOKENS + 1},
            ": 'targets' holds 7, which is not a token",
        ),
        (
            GPT,
            {"tokens": TOKENS - 1, "targets": TOKENS},
            ": 'tokens' holds -1, which is not a token",
        ),
        (OTHER, {"ids": np.full(9, 2**40)}, ": 'ids' holds numbers that do not fit into int32"),
        (
            OTHER,
            {"x": np.array([{}], object)},
            " cannot be used: it does not hold plain arrays ('x' holds Python",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(file, model, arrays, text):
    options = Arrays(path=file(**arrays))
    with pytest.raises(InputError) as error:
        build_dataset(options, model, 4, 0)
    assert str(error.value).startswith(
        f"dataset.path={options.path}{text if text[0] in ': ' else ' ' + text}"
    )


def test_a_file_that_is_missing_or_odd_is_refused_before_anything_starts(file, tmp_path):
    path = file(x=X, y=Y)
    (tmp_path / "text").write_text("x, y")
    for named, text in {
        tmp_path / "none.npz": "does not exist; write one with",
        tmp_path: "cannot be used: it is not a regular file; write",
        tmp_path / "text": "cannot be used: it is not an .npz file; write",
    }.items():
        with pytest.raises(InputError) as error:
            check_dataset(Arrays(path=str(named)), MLP, validation=False)
        assert str(error.value).startswith(f"dataset.path={named} {text}")
    with pytest.raises(InputError, match=r"has no array 'z', which dataset.names names; it has x"):
        check_dataset(Arrays(path=path, names=["z"]), MLP, validation=False)
    with pytest.raises(InputError, match=r"=0.01 of the 20 examples of .* holds none out"):
        check_dataset(Arrays(path=path, validation_fraction=0.01), MLP, validation=True)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(file):
    path = file(x=X, y=Y)
    os.chmod(path, 0)
    with pytest.raises(InputError, match="you may not read it"):
        check_dataset(Arrays(path=path), MLP, validation=False)
