"""What `transformers` itself computes from our files, and we from its: where it is installed.

pip install torch transformers
pytest -m stress tests/recipes/test_transformers.py
"""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import transformers_reference
from test_hugging_face import KINDS, TOKENS, apply, random_params, read, write

from launcher.testing import assert_allclose

pytestmark = [pytest.mark.devices, pytest.mark.stress]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_both_ways(kind, tmp_path):
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))

    def theirs(folder):
        loader = "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM"
        model = getattr(transformers, loader).from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            return model, model(torch.tensor(TOKENS)).logits.numpy()

    options, params = KINDS[kind], random_params(KINDS[kind])
    write(options, params, tmp_path / "ours")
    model, logits = theirs(tmp_path / "ours")
    assert_allclose(apply(options, params, TOKENS), logits, rtol=1e-5, atol=1e-5)
    assert_allclose(
        transformers_reference.logits(tmp_path / "ours", TOKENS), logits, rtol=1e-5, atol=1e-5
    )
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    again = apply(options, read(options, tmp_path / "theirs"), TOKENS)
    assert_allclose(np.asarray(again), logits, rtol=1e-5, atol=1e-5)
