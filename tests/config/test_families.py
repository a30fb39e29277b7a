"""A family of models or datasets is known by its name, which no other family has."""

from dataclasses import dataclass

import pytest

from launcher.config.families import (
    DatasetOptions,
    ModelOptions,
    find_datasets,
    find_models,
    register,
)


def test_families_are_found_by_the_names_of_their_modules() -> None:
    assert list(find_models()) == [
        *("bert", "gpt", "llama", "mlp", "moe", "resnet", "toy", "unet", "vit", "wide_resnet")
    ]
    assert list(find_datasets()) == [
        *("arrays", "digits", "documents", "mixture", "pictures", "stdlib_text", "synthetic"),
        *("text", "tokens"),
    ]


@pytest.mark.parametrize(("base", "name"), [(ModelOptions, "gpt"), (DatasetOptions, "text")])
def test_a_copied_family_that_kept_its_name_is_refused(base: type, name: str) -> None:
    @dataclass(frozen=True)
    class Copied(base):  # type: ignore[misc]
        name: str = "to be replaced"

    Copied.name = name
    known = (find_models if base is ModelOptions else find_datasets)()
    with pytest.raises(TypeError, match=rf"\.{name}\.options both name their family '{name}'"):
        register(Copied)
    assert known == (find_models if base is ModelOptions else find_datasets)()


def test_a_name_needs_a_default() -> None:
    @dataclass(frozen=True)
    class Nameless(ModelOptions):
        name: str

    with pytest.raises(TypeError, match="Nameless needs a default of its field `name`"):
        register(Nameless)
