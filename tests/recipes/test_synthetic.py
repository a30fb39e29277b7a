"""`recipes/datasets/synthetic/dataset.py`: shapes, purity, and that there is something to learn."""

from types import SimpleNamespace

import numpy as np
import pytest

from launcher.recipes import InputError, build_dataset, check_dataset
from launcher.recipes.datasets.synthetic import Synthetic

GPT = SimpleNamespace(name="gpt", vocab_size=11, sequence_length=32)
MLP = SimpleNamespace(name="mlp", input_size=6, output_size=2)


def build(model, num_samples=64, batch=16, seed=0, targets="network"):
    options = Synthetic(num_samples=num_samples, targets=targets)
    return build_dataset(options, model, batch, seed)


def test_tokens_follow_a_chain_with_four_successors_a_token():
    batch = build(GPT).train(0)
    assert batch["tokens"].shape == batch["targets"].shape == (16, 32)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert batch["tokens"].min() >= 0
    assert batch["tokens"].max() < 11
    followers = {}
    for dataset in (build(GPT, seed=1).train, build(GPT, seed=2).validation):
        pairs = np.stack([dataset(0)["tokens"].ravel(), dataset(0)["targets"].ravel()], axis=1)
        for token, target in pairs.tolist():
            followers.setdefault(token, set()).add(target)
    assert max(map(len, followers.values())) <= 4


def test_targets_of_the_mlp_are_one_function_of_its_inputs():
    batch = build(MLP).train(0)
    assert batch["x"].shape == (16, 6)
    assert batch["y"].shape == (16, 2)
    assert batch["x"].dtype == batch["y"].dtype == np.float32

    def pairs(batch):
        return {(x.tobytes(), y.tobytes()) for x, y in zip(batch["x"], batch["y"], strict=True)}

    other_order = build(MLP, seed=5)
    all_pairs = set().union(*(pairs(other_order.train(k)) for k in range(4)))
    assert len(all_pairs) == 64
    assert pairs(batch) < all_pairs
    assert 0.1 < batch["y"].std() < 2


def test_linear_targets_are_a_line_and_noise_of_a_tenth_and_noise_is_only_noise():
    linear, noise = (build(MLP, 1024, 1024, targets=name).train(0) for name in ("linear", "noise"))
    np.testing.assert_array_equal(linear["x"], noise["x"])

    def unexplained(batch):
        inputs = np.column_stack([batch["x"], np.ones(len(batch["x"]))])
        fit, *_ = np.linalg.lstsq(inputs, batch["y"])
        return fit, np.std(batch["y"] - inputs @ fit)

    fit, rest = unexplained(linear)
    assert 0.09 < rest < 0.11
    assert 0.3 < fit.std() < 3
    fit, rest = unexplained(noise)
    assert 0.9 < rest < 1.1
    assert np.abs(fit).max() < 0.2


@pytest.mark.parametrize("model", [GPT, MLP], ids=["gpt", "mlp"])
def test_batches_are_pure_and_validation_is_other_data(model):
    one, other = build(model), build(model)
    for key, array in one.train(7).items():
        np.testing.assert_array_equal(array, other.train(7)[key])
    key = "tokens" if model is GPT else "x"
    train = {row.tobytes() for k in range(4) for row in one.train(k)[key]}
    held_out = {row.tobytes() for k in range(4) for row in one.validation(k)[key]}
    assert len(train) == len(held_out) == 64
    assert not train & held_out
    assert one.describe == "64 made-up samples, and as many others for validation"


def test_a_model_without_samples_is_refused():
    options, model = SimpleNamespace(name="synthetic", num_samples=8), SimpleNamespace(name="vit")
    with pytest.raises(InputError) as error:
        check_dataset(options, model, validation=False)
    assert str(error.value) == (
        "dataset.name=synthetic makes no samples for model.name=vit; choose another dataset"
    )
