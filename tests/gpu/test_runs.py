"""Whole runs on this machine's GPUs, started as a user starts them."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from launched import lines

pytestmark = pytest.mark.gpu

SHORT = "train.steps=4", "train.eval_every=0", "train.log_every=1"
TINY = "model.num_layers=2", "model.hidden_size=32", "model.sequence_length=32"
RECIPES = {
    "quickstart": (),
    "smoke": ("cluster.gpus=1", "parallel.num_stages=1"),
    "gpt_text": ("dataset.path=text.txt", "model.size=nano"),
    "mlp_synthetic": (),
    "ddp_tutorial": (),
    "pipeshard_tutorial": (
        "model.widths=[256,128,256]",
        "model.input_size=64",
        "model.output_size=64",
    ),
}


def gib(number):
    return f"{number / 2**30:.2f} GiB"


def test_devices(figure, devices, on_gpu):
    """They are found, named and hidden as CUDA's own variable says, and their memory is known."""
    asked = (
        "import os, json; from launcher.cluster.devices import find_gpus; "
        "print(json.dumps([find_gpus(os.environ).names, "
        "find_gpus(os.environ | {'CUDA_VISIBLE_DEVICES': ''}).names]))"
    )
    out = subprocess.check_output([sys.executable, "-c", asked], text=True)
    names, hidden = json.loads(out)
    assert hidden == []
    if on_gpu:
        assert len(names) == devices
    figure(", ".join(names) or "none")


def test_default_command(runs, figure):
    told, found = runs.train("default", "train.steps=60", "train.eval_every=0")
    assert found[-1] < found[0]
    first = told["time_to_first_step_seconds"]
    figure(
        f"step {1e3 * told['step_seconds_median']:.1f} ms, predicted "
        f"{1e3 * told['predicted_step_seconds']:.1f}; first step after {first:.0f} s; "
        f"loss {found[0]:.3f} to {found[-1]:.3f}"
    )


def test_bf16(runs, figure):
    _, found = runs.train("bf16", *SHORT, "train.precision=bf16")
    _, full = runs.train("fp32", *SHORT)
    apart = np.max(np.abs(np.subtract(found, full) / full))
    assert apart < 2e-2
    figure(f"losses {apart:.1e} from fp32's")


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe(recipe, runs, figure, monkeypatch):
    """A few steps, against the losses on a CPU device."""
    (runs.folder / "text.txt").write_text("to be or not to be, that is the question. " * 5000)
    words = (f"recipe={recipe}", *SHORT, "cluster.gpus=1", *RECIPES[recipe])
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    _, found = runs.train("here", *words)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    _, wanted = runs.train("on-cpu", *words, "cluster=emulated")
    apart = np.max(np.abs(np.subtract(found, wanted) / wanted))
    assert apart < 1e-3
    figure(f"losses {apart:.1e} from a CPU's")


@pytest.mark.parametrize("method", ["data", "zero2", "zero3", "manual", "shard"])
def test_on_all_gpus(method, devices, runs, figure):
    if devices < 2:
        pytest.skip("one GPU")
    count = 2 ** (devices.bit_length() - 1)
    cut = {"manual": [f"parallel.num_stages={min(count, 4)}"], "shard": ["parallel.data=1"]}
    cut["shard"] += [f"parallel.model={min(count, 4)}"]
    words = (f"parallel={method}", *cut.get(method, ()))
    gpus = min(count, 4) if method in cut else count
    told, found = runs.train("all", *SHORT, *words, f"cluster.gpus={gpus}")
    _, alone = runs.train("alone", *SHORT, "parallel=data")
    np.testing.assert_allclose(found, alone, rtol=1e-2)
    figure(f"{gpus} GPUs, step {1e3 * told['step_seconds_median']:.1f} ms")


def test_a_checkpoint_goes_on(runs, figure):
    words = (*TINY, "train.eval_every=0", "train.log_every=1", "optimizer.decay=constant")
    _, undisturbed = runs.train("whole", *words, "train.steps=6")
    runs.train("parts", *words, "train.steps=3")
    _, found = runs.train("parts", *words, "train.steps=6")
    np.testing.assert_allclose(found, undisturbed, rtol=1e-5)
    figure("to the bit" if found == undisturbed else "within 1e-5")


def test_a_killed_worker_is_replaced(runs, figure):
    words = (*TINY, "train.eval_every=0", "train.log_every=1", "train.steps=400")
    running = runs.start("run.id=killed", *words, "train.checkpoint.every_steps=20")
    running.wait_for(lambda: len(lines(runs.home("killed"))) >= 30)
    running.worker().send_signal(signal.SIGKILL)
    code, _, err = running.end()
    assert code == 0, err[-1500:]
    found = [line["step"] for line in lines(runs.home("killed"))]
    assert found == list(range(1, 401))
    figure("every step once")


def test_stages_share_a_gpu(runs, figure):
    """Four stages in turn on one device."""
    words = ("parallel=manual", "parallel.num_stages=4", "parallel.schedule=interleaved_1f1b")
    told, found = runs.train("stages", *SHORT, *words, "cluster.gpus=1")
    _, alone = runs.train("alone", *SHORT, "parallel=data")
    np.testing.assert_allclose(found, alone, rtol=1e-2)
    figure(f"step {1e3 * told['step_seconds_median']:.1f} ms")


def test_calibrate_and_profile(runs, figure, on_gpu):
    """A plan from measured layers, against the step that was then measured."""
    words = ("train.eval_every=0", "train.steps=40", "model.size=micro", "train.precision=bf16")
    if not on_gpu:
        words = (*words[:1], *TINY, "train.steps=8")
    code, _, err = runs.start("task=calibrate").end()
    assert code == 0, err[-1500:]
    parts = []
    for cost in ("model", "profile"):
        told, _ = runs.train(cost, *words, f"parallel.cost={cost}")
        off = told["predicted_step_seconds"] / told["step_seconds_median"] - 1
        parts.append(f"{cost} {off:+.0%}")
    figure("predicted step: " + ", ".join(parts))


def test_memory(runs, figure, on_gpu):
    words = ("train.steps=8", "train.eval_every=0", "model.size=125m", "train.precision=bf16")
    if not on_gpu:
        words = (*words[:2], *TINY)
    told, _ = runs.train("memory", *words, "train.checkpoint.at_end=false")
    measured, predicted = told["peak_memory_bytes"], told["predicted_peak_memory_bytes"]
    figure(f"{gib(measured)} at most, predicted {gib(predicted)} ({predicted / measured - 1:+.0%})")


def test_variables_reach_the_worker(runs, figure, on_gpu):
    """A GPU that the user hides is not used."""
    if not on_gpu:
        pytest.skip("no GPU to hide")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        code, out, err = runs.start("run.id=hidden", *SHORT, *TINY).end()
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    assert code == 0, err[-1500:]
    assert "stand" in out
    figure("CPU devices stood in")
