"""What a compiler says of a plan: each distinct program once, peaks as the runtime has them."""

import dataclasses
import functools
import os
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import launcher
from launcher.base import jax_compat
from launcher.plan import Plan, PlanError, local_shape
from launcher.plan.methods import DataParallel, PipeshardParallel, UniformStageOption
from launcher.recipes import build_model
from launcher.recipes.models.mlp import MLPOptions
from launcher.runtime import compile_for, compile_now, compile_step, target_for, target_of
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import Send
from launcher.runtime.programs.compile import Compilation
from launcher.trace import trace_step

MODEL = build_model(MLPOptions(input_size=4, hidden_size=8, output_size=2, num_layers=4), "fp32")
BATCH = {
    "x": jax.ShapeDtypeStruct((8, 4), jnp.float32),
    "y": jax.ShapeDtypeStruct((8, 2), jnp.float32),
}


def step(params, batch):
    def loss(params, batch):
        return MODEL.loss(params, batch, None)

    (value, _), grads = launcher.value_and_grad(loss, has_aux=True)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@functools.cache
def planned(stages, devices=4, hosts=1):
    traced = trace_step(step, (jax.eval_shape(MODEL.init, jax.random.key(0)), BATCH))
    option = UniformStageOption(stages)
    method = PipeshardParallel(2, stage_option=option) if stages > 1 else DataParallel(1)
    return traced, method.plan(traced, local_shape(devices, hosts, "cpu"))


@pytest.fixture
def compiles(monkeypatch):
    """The programs that are compiled."""
    found, compile_one = [], jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self, **_: found.append(self) or compile_one(self)
    )
    return found


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_peaks_are_those_of_the_programs_that_run(stages):
    traced, plan = planned(stages)
    report, text = compile_now(traced, plan, target_for(plan))
    executable = compile_step(traced, plan, jax.devices()[:4])
    assert max(stage.memory_bytes for stage in report.stages) == executable.peak_bytes
    running = executable.compiled()
    assert running.report.stages == report.stages
    assert running.text.keys() == text.keys() == {n for p in report.programs for n in p.names}
    for stage in report.stages:
        assert 0 < stage.state_bytes <= stage.memory_bytes - stage.temporary_bytes
    assert report.errors == ()
    assert report.device == "cpu"


def test_equal_programs_are_compiled_once_for_all_stages(compiles):
    traced, plan = planned(4)
    told = []
    report, text = compile_now(traced, plan, target_for(plan), lambda *said: told.append(said))
    assert len(compiles) == len(report.programs) < len(text)
    assert {"stage.1.forward", "stage.2.forward"} in map(set, (p.names for p in report.programs))
    assert told[-1] == (len(compiles), len(compiles))


def test_what_was_compiled_before_is_read(compiles):
    traced, plan = planned(2)
    first = compile_for(traced, plan, target_for(plan))
    count = len(compiles)
    again = compile_for(traced, plan, target_for(plan))
    assert len(compiles) == count > 0
    assert dataclasses.replace(again, seconds=first.seconds) == first


def with_slow_backward(plan):
    """Return the plan with its first stage's backward pass so slow that others overtake it."""
    first, *others = plan.stages
    slow = dataclasses.replace(first, forward_seconds=1e3 * first.forward_seconds)
    return dataclasses.replace(plan, stages=(slow, *others))


OTHERS = {
    "stages": lambda plan: planned(4)[1],
    "hosts": lambda plan: planned(2, hosts=2)[1],
    "order of tasks": with_slow_backward,
    "version of the compiler": lambda plan: plan,
    "version of the plug-in": lambda plan: plan,
    "XLA_FLAGS": lambda plan: plan,
    "device": lambda plan: plan,
}
PLUGINS = [SimpleNamespace(dist=SimpleNamespace(version="0.99"))]


@pytest.mark.slow
def test_another_plan_is_compiled_anew(compiles, monkeypatch):
    traced, plan = planned(2)
    target = target_for(plan)
    compile_for(traced, plan, target)
    for what, changed in OTHERS.items():
        count = len(compiles)
        with monkeypatch.context() as patch:
            if what == "version of the compiler":
                patch.setattr("launcher.base.measurements.version", lambda name: "0.99")
            elif what == "version of the plug-in":
                patch.setattr("launcher.runtime.described.entry_points", lambda group: PLUGINS)
            elif what == "XLA_FLAGS":
                patch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
            device = target._replace(text="another") if what == "device" else target
            compile_for(traced, changed(plan), device)
        assert len(compiles) > count, what


@pytest.mark.parametrize(("hosts", "local"), [(1, [True] * 3), (2, [True, False, True])])
def test_hosts_pull_from_one_another_as_where_each_has_a_process(monkeypatch, hosts, local):
    """What another process may pull is not donated, here and there."""
    seen = []

    def noted(emitted, placement, *rest):
        seen.append((emitted, placement))
        return Compilation(emitted, placement, *rest)

    monkeypatch.setattr("launcher.runtime.described.Compilation", noted)
    traced, plan = planned(4, hosts=hosts)
    compile_now(traced, plan, target_for(plan))
    [(emitted, placement)] = seen
    sends = [x for x in emitted.instructions if isinstance(x, Send)]
    found = {(min(x.src, x.dst), max(x.src, x.dst)): placement.is_local(x) for x in sends}
    assert [found[0, 1], found[1, 2], found[2, 3]] == local


def test_a_plugin_that_jax_gave_up_is_asked_once_more(monkeypatch):
    """As in a process without a GPU that has used JAX before."""
    plugin, said = SimpleNamespace(), []
    plugin.initialize = lambda: said.append(os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"])

    def described(*_, **__):
        if not said:
            raise NotImplementedError("topology not implemented for cuda")
        return SimpleNamespace(devices=["a GPU"])

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", described)
    monkeypatch.setitem(sys.modules, "jax_plugins.xla_cuda12", plugin)
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    assert jax_compat.described_devices("text", 1) == ["a GPU"]
    assert said == ["1"]
    assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ


def no_tile_fits(*_):
    raise RuntimeError("INTERNAL: no tile fits %dot.42\nand a trace")


def lowering_fails(patch):
    def emitted(*args):
        found = emit(*args)
        programs = {
            name: dataclasses.replace(made, fun=no_tile_fits) if "stage.1" in name else made
            for name, made in found.programs.items()
        }
        return dataclasses.replace(found, programs=programs)

    patch.setattr("launcher.runtime.described.emit", emitted)


def compiling_fails(patch):
    def compiled(lowered, options):
        return no_tile_fits() if "stage.1" in lowered.as_text()[:80] else works(lowered, options)

    works = jax_compat.compiled
    patch.setattr("launcher.runtime.described.compiled", compiled)


@pytest.mark.parametrize("fails", [lowering_fails, compiling_fails])
def test_what_does_not_compile_is_told_and_not_kept(monkeypatch, fails):
    traced, plan = planned(2)
    with monkeypatch.context() as patch:
        fails(patch)
        report = compile_for(traced, plan, target_for(plan))
    told = {(e.stages, e.message) for e in report.errors}
    assert told == {((1,), "INTERNAL: no tile fits %dot.42")}
    failed = report.stages[1]
    assert (failed.memory_bytes, failed.temporary_bytes, failed.program) == (None, 0, "")
    assert report.stages[0].memory_bytes
    assert all(not name.startswith("stage.1") for p in report.programs for name in p.names)
    assert compile_for(traced, plan, target_for(plan)).errors == ()


def test_a_plan_keeps_what_the_compiler_says_as_json():
    traced, plan = planned(2)
    plan = dataclasses.replace(plan, compiled=compile_for(traced, plan, target_for(plan)))
    assert Plan.from_dict(plan.to_dict()) == plan
    found = plan.with_compiled_memory()
    memory = [stage.memory_bytes for stage in plan.compiled.stages]
    assert [stage.memory_bytes for stage in found.stages] == memory


@pytest.mark.parametrize(
    ("kind", "count", "says"),
    [
        ("Voodoo 2", 1, "no file in conf/device/ describes the GPU 'Voodoo 2'"),
        ("cpu", 999, "compiling for 999 CPU devices needs as many here"),
    ],
)
def test_devices_that_are_not_known_are_refused(kind, count, says):
    with pytest.raises(PlanError, match=says):
        target_of(kind, count)


def test_without_the_compiler_one_sentence_says_what_brings_it(monkeypatch):
    def absent(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", absent)
    with pytest.raises(PlanError, match="cuda12-local"):
        target_of("h100", 8)
