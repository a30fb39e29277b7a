"""`launcher/driver/folder/folder.py`: a run does not go on with other data."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from launcher.checkpoint import RunMetadata
from launcher.config.compose import to_dict
from launcher.config.errors import ConfigError
from launcher.config.reader import from_dict
from launcher.driver.folder.folder import check_same_run
from launcher.recipes import fingerprint_dataset

ROW = {"vocab_size": 256, "sequence_length": 4, "num_layers": 1, "num_heads": 2, "hidden_size": 8}


def config_of(**dataset):
    return from_dict({"model": {"name": "gpt", "size": None, **ROW}, "dataset": dataset})


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    path = tmp_path / "tokens.bin"
    tokens = np.arange(10**6, dtype=np.uint16)
    tokens.tofile(path)
    config = config_of(name="tokens", path=str(path))
    stored = RunMetadata("mine", to_dict(config), {}, 7, fingerprint_dataset(config.dataset))
    check_same_run(Path("outputs/mine"), 7, stored, config)
    tokens[-3] += 1
    tokens.tofile(path)
    with pytest.raises(ConfigError) as error:
        check_same_run(Path("outputs/mine"), 7, stored, config)
    assert str(error.value) == (
        "the data of dataset=tokens has changed since run.id=mine reached step 7: its files hold "
        "something else. Put the files back to resume that run, or choose another run.id."
    )


def without_time(info):
    info.mtime = 0
    return info


@pytest.mark.parametrize("format", ["folder", "tar", "npz"])
def test_a_run_does_not_go_on_with_other_pictures(tmp_path, monkeypatch, format):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "album"

    def write(last):
        """Pictures, of which a later one may be another; no name and no size changes."""
        (path / "a").mkdir(parents=True, exist_ok=True)
        images = np.zeros((8, 4, 4, 3), np.uint8)
        images[-1] = last
        for i, points in enumerate(images):
            Image.fromarray(points).save(path / "a" / f"{i}.bmp")
        np.savez(path / "x.npz", image=images, label=np.zeros(8, int))
        with tarfile.open(path / "x.tar", "w") as archive:
            archive.add(path / "a", "a", filter=without_time)

    write(1)
    row = {"image_size": 4, "channels": 3, "num_classes": 2, "patch_size": 2, "num_layers": 1}
    model = {"name": "vit", "size": None, **row, "num_heads": 1, "hidden_size": 4}
    dataset = {"name": "pictures", "path": str(path), "format": format}
    config = from_dict({"model": model, "dataset": dataset})
    stored = RunMetadata("mine", to_dict(config), {}, 7, fingerprint_dataset(config.dataset))
    check_same_run(Path("outputs/mine"), 7, stored, config)
    write(1)
    check_same_run(Path("outputs/mine"), 7, stored, config)
    write(2)
    with pytest.raises(ConfigError, match="the data of dataset=pictures has changed since"):
        check_same_run(Path("outputs/mine"), 7, stored, config)


def test_a_checkpoint_that_says_nothing_of_its_data_is_taken(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    config = config_of(name="text", path=str(tmp_path))
    check_same_run(Path("outputs/mine"), 7, RunMetadata("mine", to_dict(config), {}, 7), config)
    assert fingerprint_dataset(config.dataset)


def test_the_fingerprint_of_data_without_content_is_empty():
    assert fingerprint_dataset(config_of(name="synthetic").dataset) == ""
