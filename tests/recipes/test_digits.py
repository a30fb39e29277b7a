"""`digits`: for models of pictures and of vectors; what does not fit is refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from launcher.recipes import InputError, build_dataset, check_dataset
from launcher.recipes.datasets.digits import Digits

VIT = SimpleNamespace(name="vit", image_size=16, channels=3, num_classes=10)
MLP = SimpleNamespace(name="mlp", input_size=64, output_size=10)


def test_pictures_and_vectors_are_the_same_digits():
    for model in (VIT, MLP):
        check_dataset(Digits(), model, validation=True)
    pictures, vectors = (build_dataset(Digits(), model, 32, 0) for model in (VIT, MLP))
    picture, vector = pictures.train(3), vectors.train(3)
    assert picture["image"].shape == (32, 16, 16, 3)
    assert picture["label"].dtype == np.int32
    np.testing.assert_array_equal(vector["y"].argmax(1), picture["label"])
    np.testing.assert_array_equal(
        picture["image"][:, ::2, ::2, 1].reshape(32, 64), vector["x"].reshape(32, 64)
    )
    assert (vector["x"].min(), vector["x"].max()) == (0, 1)
    assert pictures.validation.num_rows == 179
    held = np.concatenate([pictures.validation(k)["label"] for k in range(6)])
    assert (len(held), len(np.unique(held))) == (179, 10)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (SimpleNamespace(name="vit", image_size=9), "model.image_size=9 is not a multiple of 8"),
        (SimpleNamespace(name="vit", image_size=8, num_classes=3), "need model.num_classes=10"),
        (SimpleNamespace(name="mlp", input_size=3, output_size=10), "need model.input_size=64"),
        (SimpleNamespace(name="odd"), "model.name=odd does not take digits"),
        (SimpleNamespace(name="odd", input_size=None), "need model.input_size=64"),
        (SimpleNamespace(name="vit", image_size=8, num_classes="x"), "need model.num_classes=10"),
    ],
)
def test_refuses_models_of_other_sizes(model, text):
    with pytest.raises(InputError, match=text):
        check_dataset(Digits(), model, validation=False)
    with pytest.raises(InputError, match="holds out no digit"):
        check_dataset(Digits(validation_fraction=0.0), MLP, validation=True)
