"""What the planner refuses is told a Python user without naming a setting of the YAML."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.api.parallelize import in_python, python_words
from launcher.plan import PlanError
from launcher.plan.plan import TooLargeError

W = np.eye(4, dtype=np.float32)
X = np.ones((8, 4), np.float32)
AUTO = {"num_micro_batches": None, "stage_option": "auto"}


def step(w, x):
    def loss(w, x):
        x = jnp.tanh(x @ w)
        launcher.mark_pipeline_boundary()
        return jnp.mean(x @ w)

    return w - launcher.grad(loss)(w, x)


def stages(number, **options):
    return launcher.PipeshardParallel(stage_option=launcher.UniformStageOption(number), **options)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (stages(3), "num_stages=3 is more than the model's 2 layers"),
        (stages(0), "num_stages=0 must be at least 1"),
        (stages(2, schedule="1f2b"), "schedule=1f2b is not one of"),
        (stages(2, remat="half"), "remat=half is not one of"),
        (stages(2, remat=("full",) * 3), "remat lists 3 names for 2 stages"),
        (launcher.ThreeDParallel(data=3), "= 3 × 1 × 1 needs 3 devices and there are 2; make"),
        (
            launcher.PipeshardParallel(**AUTO, schedule="gpipes"),
            "schedule=gpipes is not searched for; give auto, .* or a stage_option",
        ),
        (
            launcher.PipeshardParallel(layer_option=launcher.AutoLayerOption(99)),
            "num_layers=99 does not fit a forward pass of",
        ),
    ],
)
def test_what_is_refused_names_no_setting(method, text):
    parallel = launcher.parallelize(step, method=method, devices=jax.devices()[:2])
    with pytest.raises((PlanError, launcher.trace.TraceError), match=text) as refused:
        parallel.plan(W, X)
    assert not re.search(r"\b(parallel|cluster|train)[.=]", str(refused.value))


def test_advice_that_is_searched_for_is_in_these_words_too():
    error = TooLargeError("it needs more (cluster.gpus)", None, lambda: "; give cluster.gpus=4")
    with pytest.raises(TooLargeError, match=r"^it needs more; give devices=4$"), python_words():
        raise error


def test_the_words():
    told = in_python(
        "Use more devices (cluster.hosts, cluster.gpus), a smaller train.global_batch_size, "
        "parallel.num_stages=auto, cluster.hosts=2 cluster.gpus=16, or parallel.cost=model"
    )
    assert told == (
        "Use more devices, a smaller batch size, num_stages=None, hosts=2 devices=16, or cost=model"
    )
