"""The planner's estimate of each family's memory against what its compiled programs say."""

import functools
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from launcher.config.compose import load
from launcher.trace import trace_step
from launcher.train.step import init_state, make_train_step
from recipes import build_dataset, build_model

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from test_memory_measured import check

ROWS = 32
_TEXT = "hidden_size=128 num_heads=4 num_layers=4 sequence_length=64 vocab_size=256"
MODELS = {
    "llama": _TEXT,
    "moe": f"{_TEXT} num_experts=4 mlp_size=256",
    "bert": _TEXT,
    "vit": "hidden_size=128 num_heads=4 num_layers=4 patch_size=4 image_size=32 num_classes=10",
    "resnet": "depth=18 width=16 image_size=16 num_classes=10",
    "unet": "width=16 levels=2 blocks=2 image_size=16",
}
CASES = "two_stages", "one_stage", "replicas"


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=pytest.mark.stress if (m + k) % 3 else pytest.mark.slow)
        for m, name in enumerate(MODELS)
        for k, case in enumerate(CASES)
    ],
)
def test_the_estimate_is_within_fifteen_percent(name, case, request):
    if (name, case) == ("unet", "one_stage"):
        why = "the estimate of long skips on one device is 18 % over"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    words = [f"model.{word}" for word in MODELS[name].split()]
    config = load([f"model={name}", *words, "dataset=synthetic"])
    model, optimizer = build_model(config.model, "fp32"), optax.adam(1e-3)
    batch = build_dataset(config.dataset, config.model, ROWS, seed=0).train(0)
    step = make_train_step(model, optimizer, lambda count: 1e-3)
    init = functools.partial(init_state, model, optimizer)
    state = jax.eval_shape(init, np.zeros(2, np.uint32))
    check(trace_step(step, (state, batch)), case, within=0.15)
