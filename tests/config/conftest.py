"""Files of settings that several files of tests write."""

import pytest


@pytest.fixture
def mine(tmp_path):
    """Writes a file of settings into `tmp_path`, and returns it as the folders of `load`."""

    def write(text, name="recipe/mine"):
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{text}" if name.startswith("recipe/") else text)
        return [str(tmp_path)]

    return write
