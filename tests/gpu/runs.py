"""Parts that are whole runs of `python -m launcher`, started as a user starts them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
from launched import Launcher, lines, losses, summary

ON = os.environ.get("GPU_TESTS_ON", "gpu")
GPU = ON == "gpu"
QUIET = "train.eval_every=0", "train.log_every=1"
TINY = "model.num_layers=2", "model.hidden_size=32", "model.sequence_length=32"
STEADY = *TINY, *QUIET, "optimizer.decay=constant"


def start(folder, run, *words):
    """A run on the GPU, or on emulated devices."""
    where = ["cluster=local" if GPU else "cluster=emulated"]
    if not any(word.startswith("cluster.gpus=") for word in words):
        where.append("cluster.gpus=1")
    return Launcher(folder, f"run.id={run}", "wandb.mode=disabled", *where, *words)


def train(folder, run, *words):
    """Run to the end; returns what it printed."""
    code, out, err = start(folder, run, *words).end()
    assert code == 0, f"{err[-1500:]}\n{out[-500:]}"
    return out


def apart(found, wanted):
    """The largest difference of two series of losses, as a share."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def of_run(home):
    """What a run's summary and plan say of prediction and measurement."""
    told = summary(home)
    names = ("step_seconds_median", "predicted_step_seconds", "compile_seconds", "plan_seconds")
    more = ("time_to_first_step_seconds", "peak_memory_bytes", "predicted_peak_memory_bytes")
    return {name: told.get(name) for name in (*names, *more)}


def default(folder):
    steps = 60 if GPU else 8
    train(folder, "default", f"train.steps={steps}", "train.eval_every=0")
    home = folder / "outputs" / "default"
    told, found = of_run(home), losses(home)
    assert found[-1] < found[0]
    first, memory = told["time_to_first_step_seconds"], told["peak_memory_bytes"] or 0
    yield (
        f"step {1e3 * told['step_seconds_median']:.1f} ms, predicted "
        f"{1e3 * told['predicted_step_seconds']:.1f}; first step after {first:.0f} s; "
        f"{memory / 2**20:.0f} MiB at most, predicted "
        f"{(told['predicted_peak_memory_bytes'] or 0) / 2**20:.0f}",
        told,
    )
    events = json.loads((home / "timeline.json").read_text())["traceEvents"]
    kinds = sorted({event.get("cat", "") for event in events if event.get("ph") == "X"})
    assert {"forward_backward", "update"} & set(kinds) or {"forward"} & set(kinds), kinds
    yield f"its recorded step, without the device tracer: {', '.join(filter(None, kinds))}", {}
    found = json.loads((home / "accounting.json").read_text())
    parts = {part["name"]: part["measured_seconds"] for part in found["parts"]}
    whole, share = found["measured_step_seconds"], parts["compute"] / found["measured_step_seconds"]
    yield f"its parts: {sum(parts.values()) / whole:.3f} of the step, compute {share:.2f}", parts
    assert abs(sum(parts.values()) - whole) <= 0.02 * whole


def life(folder):
    """Interrupted, resumed twice with an empty compilation cache, and asked for text."""
    running = start(folder, "life", *STEADY, "train.steps=100000")
    home = folder / "outputs" / "life"
    running.wait_for(lambda: len(lines(home)) >= 5)
    began = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    code, _, err = running.end(soon=30)
    assert code == 130, err[-1500:]
    saved = max(int(path.name) for path in (home / "checkpoints").iterdir() if path.name.isdigit())
    yield f"Ctrl-C: exit code 130 after {time.monotonic() - began:.1f} s, step {saved} saved", {}
    for number in (1, 2):
        (folder / f"again{number}").mkdir()
        shutil.copytree(folder / "outputs", folder / f"again{number}" / "outputs")
    found = []
    for number in (1, 2):
        os.environ["XDG_CACHE_HOME"] = str(folder / f"cache{number}")  # compiled anew
        train(folder / f"again{number}", "life", *STEADY, f"train.steps={saved + 5}")
        found.append(losses(folder / f"again{number}" / "outputs" / "life")[-5:])
    same = found[0] == found[1]
    chosen = [
        {path.name for path in at.rglob("autotune/*/*/**/*.*") if path.suffix != ".program"}
        for at in (home, folder / "again1", folder / "again2")
    ]
    assert bool(chosen[0]) == GPU, "XLA's choices are not kept"
    yield (
        f"two resumes, each compiled anew: losses {'to the bit' if same else 'differ'}"
        + ("" if same else f" by {apart(*found):.1e}")
        + f"; {len(chosen[0])} choices of kernels kept, {len(chosen[1] - chosen[0])} and "
        f"{len(chosen[2] - chosen[0])} made since",
        {"losses": found},
    )
    assert chosen[0] == chosen[1] == chosen[2]
    began = time.monotonic()
    words = ("task=generate", "prompt=import", "generate.max_new_tokens=16")
    code, out, err = start(folder / "again1", "life", *words).end()
    assert code == 0, err[-1500:]
    assert "import" in out
    yield f"16 tokens of text in {time.monotonic() - began:.1f} s, start included", {}


def killed(folder):
    words = (*STEADY, "train.steps=200", "train.checkpoint.every_steps=10")
    running = start(folder, "killed", *words)
    home = folder / "outputs" / "killed"
    running.wait_for(lambda: len(lines(home)) >= 15)
    running.worker().send_signal(signal.SIGKILL)
    code, _, err = running.end()
    assert code == 0, err[-1500:]
    assert [line["step"] for line in lines(home)] == list(range(1, 201))
    yield "every step once", {}


def watchdog(folder):
    running = start(folder, "stopped", *STEADY, "train.steps=200", "cluster.step_timeout=15")
    running.wait_for(lambda: len(lines(folder / "outputs" / "stopped")) >= 5)
    running.workers()[0].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    code, _, err = running.end()
    assert "its process was stopped" in err, err[-1500:]
    yield (
        f"noticed, named and replaced; exit code {code} after {time.monotonic() - began:.0f} s",
        {},
    )
    assert code == 0, err[-1500:]


def traced(folder):
    began = time.monotonic()
    words = ("report.timeline_steps=[]", "report.profiler_steps=[3]")
    out = train(folder, "traced", *TINY, *QUIET, "train.steps=5", *words)
    files = list((folder / "outputs" / "traced" / "profile").rglob("*.xplane.pb"))
    size = sum(path.stat().st_size for path in files)
    lost = ", its stop timed out" if "has not stopped" in out else ""
    assert files or lost, "no trace, and no word of it"
    yield f"{len(files)} traces, {size / 2**20:.1f} MiB, {time.monotonic() - began:.0f} s{lost}", {}


def calibrate(folder):
    code, out, err = Launcher(
        folder, "task=calibrate", "cluster.gpus=1", *([] if GPU else ["cluster=emulated"])
    ).end()
    assert code == 0, err[-1500:]
    kept = [json.loads(path.read_text()) for path in cache(folder).rglob("calibration/*.json")]
    assert kept, "nothing is kept"
    for row in filter(None, out.splitlines()):  # what is measured beside what the datasheet says
        yield row[:200], {}
    yield "kept", {"calibration": kept}
    words = ("train.steps=30", "model.size=micro", "train.precision=bf16") if GPU else TINY
    for cost in ("model", "measured", "profile"):
        train(folder, cost, *QUIET, "train.steps=12", *words, f"parallel.cost={cost}")
        told = of_run(folder / "outputs" / cost)
        off = told["predicted_step_seconds"] / told["step_seconds_median"] - 1
        yield (
            f"parallel.cost={cost}: step predicted {off:+.0%}",
            {"cost": cost, **told},
        )


def cache(folder):
    """The folder of what is measured once."""
    return Path(os.environ.get("XDG_CACHE_HOME", folder))


def precision(folder):
    short = (*QUIET, "train.steps=4", *(() if GPU else TINY))
    found = []
    for word in ("bf16", "fp32"):
        train(folder, word, *short, f"train.precision={word}")
        found.append(losses(folder / "outputs" / word))
    off = apart(*found)
    yield f"losses {off:.1e} from fp32's", {}
    assert off < 2e-2


RECIPES = {
    "quickstart": (),
    "smoke": ("cluster.gpus=1", "parallel.num_stages=1"),
    "gpt_text": ("dataset.path=text.txt", "model.size=nano"),
    "mlp_synthetic": (),
    "ddp_tutorial": (),
    "pipeshard_tutorial": (
        *("model.widths=[256,128,256]", "model.input_size=64", "model.output_size=64"),
    ),
}


def recipes(folder):
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 5000)
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    for recipe, words in RECIPES.items() if GPU else [("smoke", RECIPES["smoke"])]:
        words = (f"recipe={recipe}", *QUIET, "train.steps=4", "cluster.gpus=1", *words)
        train(folder, f"{recipe}-here", *words)
        os.environ["JAX_PLATFORMS"], kept = "cpu", os.environ.get("JAX_PLATFORMS")
        train(folder, f"{recipe}-cpu", *words, "cluster=emulated")
        del os.environ["JAX_PLATFORMS"]
        if kept:
            os.environ["JAX_PLATFORMS"] = kept
        homes = (folder / "outputs" / f"{recipe}-{on}" for on in ("here", "cpu"))
        off = apart(*map(losses, homes))
        yield f"{recipe}: losses {off:.1e} from a CPU's", {}
        assert off < 1e-3


def num_gpus():
    """How many GPUs there are, of which the user may have hidden some; two emulated devices."""
    if not GPU:
        return 2
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = subprocess.check_output(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"])
    return len(found.splitlines()) if visible is None else len(visible.split(","))


def all_gpus(folder):
    devices = num_gpus()
    if devices < 2:
        yield "one GPU: nothing to try", {}
        return
    count = 2 ** (devices.bit_length() - 1)
    short = (*QUIET, "train.steps=4", *(() if GPU else TINY))
    train(folder, "alone", *short, "parallel=data")
    wanted = losses(folder / "outputs" / "alone")
    tried = (
        *((method, count, ()) for method in ("data", "zero2", "zero3")),
        ("manual", min(count, 4), (f"parallel.num_stages={min(count, 2)}",)),
        ("shard", min(count, 4), ("parallel.data=1", f"parallel.model={min(count, 4)}")),
    )
    for method, gpus, words in tried if GPU else tried[2:4]:
        train(folder, method, *short, f"parallel={method}", f"cluster.gpus={gpus}", *words)
        home = folder / "outputs" / method
        off, told = apart(losses(home), wanted), of_run(home)
        step = 1e3 * told["step_seconds_median"]
        yield f"{method}: {gpus} GPUs, step {step:.1f} ms, losses {off:.1e} apart", told
        assert off < 1e-2


def hidden(folder):
    asked = (
        "import os, json; from launcher.cluster.devices import find_gpus; "
        "print(json.dumps([find_gpus(os.environ).names, "
        "find_gpus(os.environ | {'CUDA_VISIBLE_DEVICES': ''}).names]))"
    )
    names, none = json.loads(subprocess.check_output([sys.executable, "-c", asked], text=True))
    yield f"found: {', '.join(names) or 'none'}", {}
    assert none == []
    if GPU:
        assert len(names) == num_gpus()
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        out = train(folder, "hidden", *QUIET, *TINY, "train.steps=3")
        assert re.search("stand in", out)
        yield "hidden by CUDA_VISIBLE_DEVICES, CPU devices stood in", {}
