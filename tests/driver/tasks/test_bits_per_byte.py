"""`task=evaluate`: bits per byte of data that know how long their text is."""

import json

import numpy as np
import pytest

from launcher.config.compose import load
from launcher.driver.tasks.evaluate import _derived
from launcher.recipes import prepare_dataset


def test_bits_per_byte_are_the_loss_over_the_bytes_of_a_target(tmp_path):
    source, plain = tmp_path / "a.jsonl", tmp_path / "plain.bin"
    source.write_text((json.dumps({"text": "a" * 49}) + "\n") * 200)
    np.zeros(10_000, np.uint16).tofile(plain)
    words = ["model.vocab_size=257", "model.sequence_length=100"]
    config = load([*words, "dataset=jsonl", f"dataset.path={source}"])
    prepare_dataset(config.dataset, 1, lambda share: None)
    found = _derived(config, 2.0, rows=3)
    # Of 50 tokens one ends a document.
    assert found["bits_per_byte"] == pytest.approx(2 / np.log(2) * 50 / 49)
    config = load([*words, "dataset=tokens", f"dataset.path={source}.tokens"])
    assert _derived(config, 2.0, rows=3) == found
    config = load([*words, "dataset=tokens", f"dataset.path={plain}"])
    assert set(_derived(config, 2.0, rows=3)) == {"perplexity"}
    assert _derived(load([]), 2.0, rows=3)["bits_per_byte"] == pytest.approx(2 / np.log(2))
