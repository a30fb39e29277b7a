"""`recipes/__init__.py`: dispatch by name, and what it costs to import and to check."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import launcher.recipes


def test_an_unknown_name_gets_the_known_ones():
    odd = SimpleNamespace(name="gtp")
    with pytest.raises(launcher.recipes.InputError) as error:
        launcher.recipes.build_model(odd, "fp32")
    assert str(error.value) == (
        "model.name=gtp is not known; choose one of bert, gpt, llama, mlp, moe, resnet, toy, unet, "
        "vit, wide_resnet"
    )
    with pytest.raises(launcher.recipes.InputError) as error:
        launcher.recipes.build_dataset(odd, odd, 8, 0)
    assert str(error.value) == (
        "dataset.name=gtp is not known; choose one of arrays, digits, documents, mixture, "
        "pictures, stdlib_text, synthetic, text, tokens"
    )


@pytest.mark.devices
@pytest.mark.parametrize("dataset", ["stdlib_text", "synthetic"])
def test_checking_a_dataset_loads_neither_jax_nor_grain(dataset):
    program = f"""
import sys
from types import SimpleNamespace
import launcher.recipes
model = SimpleNamespace(name="gpt", vocab_size=256, sequence_length=16)
data = SimpleNamespace(name="{dataset}", validation_fraction=0.05, num_samples=8)
launcher.recipes.check_dataset(data, model, validation=True)
heavy = {{"jax", "flax", "grain", "launcher.api.parallelize"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True)
