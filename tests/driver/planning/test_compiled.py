"""`plan.compile` and `parallel.verify`: plans as the compiler of their devices sees them."""

import dataclasses
import functools
import io
import json
import re
from types import SimpleNamespace

import pytest
from layered import layered_step

from launcher.__main__ import main
from launcher.config.compose import load
from launcher.driver.planning import compiled, prepare
from launcher.driver.planning.check import look
from launcher.plan import CompiledPlan, CompiledStage, CompileError, PlanError, local_shape
from launcher.plan.methods import DataParallel, Zero2Parallel, Zero3Parallel
from launcher.report.console import make_console
from launcher.runtime import Target, compile_for, target_of

ROOM = 1 << 20
METHODS = DataParallel, Zero2Parallel, Zero3Parallel
H100 = Target([SimpleNamespace(device_kind="H100-SXM5-80GB")], {}, "an H100")
MLP = ("model=mlp", "dataset=synthetic", "train.eval_every=0", "wandb.mode=disabled")


@functools.cache
def plans():
    step = layered_step([(16, 16)] * 4, 32, updated=range(4))
    shape = dataclasses.replace(local_shape(4, 1, "cpu"), memory_bytes=ROOM)
    return step, [method(1).plan(step, shape) for method in METHODS]


def report(memory, error=""):
    errors = (CompileError("stage.0.forward", (0,), error),) if error else ()
    stage = CompiledStage(ROOM, None if error else memory, 10, 20, "stage.0.forward")
    return CompiledPlan("H100-SXM5-80GB", (stage,), (), errors, 0.0)


FITS, OVER, BROKEN = report(ROOM), report(ROOM + 1024), report(0, "INTERNAL: no tile")


@pytest.fixture
def compiler(monkeypatch):
    """Has a compiler say something of each plan in turn; returns the methods of those it saw."""

    def says(*reports):
        left, seen = list(reports), []

        def compile_for(step, plan, target, progress):
            seen.append(plan.method)
            progress(1, 1)
            return left.pop(0)

        monkeypatch.setattr(compiled, "compile_for", compile_for)
        return seen

    return says


@pytest.mark.parametrize(
    ("reports", "taken"),
    [((FITS,), 0), ((OVER, FITS), 1), ((BROKEN, OVER, FITS), 2)],
    ids=["first", "second", "third"],
)
def test_the_first_plan_that_fits_as_compiled_is_taken(compiler, reports, taken):
    seen = compiler(*reports)
    step, known = plans()
    found, why = compiled.verified(known, step, H100, make_console(io.StringIO()))
    assert [plan.method for plan in found] == [plan.method for plan in known[taken:]]
    assert seen == [plan.method for plan in known[: taken + 1]]
    assert [stage.memory_bytes for stage in found[0].stages] == [ROOM]
    assert found[0].compiled == FITS
    assert why == ""


@pytest.mark.devices
def test_a_compiler_has_a_plan_give_way(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    step, known = plans()
    target = target_of("cpu", 4)
    peaks = [compile_for(step, plan, target).stages[0].memory_bytes for plan in known]
    assert peaks[2] < peaks[0]
    less = [
        dataclasses.replace(plan, cluster={**plan.cluster, "memory_bytes": peaks[0] - 1})
        for plan in (known[0], known[2])
    ]
    found, why = compiled.verified(less, step, target, make_console(io.StringIO()))
    assert ([plan.method for plan in found], why) == (["zero3"], "")
    assert found[0].stages[0].memory_bytes == peaks[2]


def test_where_no_plan_fits_the_best_one_tells_why(compiler, said):
    compiler(OVER, BROKEN, OVER)
    step, known = plans()
    found, why = compiled.verified(known, step, H100, make_console(io.StringIO()))
    assert found == known
    assert why == (
        "of 3 plans none fits as it is compiled; the best: as compiled, it needs 1.00 MiB a "
        "device, 1.00 KiB more than its 1.00 MiB"
    )
    assert "1 of its programs do not compile for H100-SXM5-80GB; stage.0.forward" in said[1]


@pytest.mark.parametrize("reports", [(FITS,), (OVER, FITS)], ids=["fits", "gives way"])
def test_a_search_takes_what_its_compiler_accepts(compiler, monkeypatch, reports):
    step, known = plans()
    monkeypatch.setattr(prepare, "plans_of", lambda *_: list(known))
    compiler(*reports)
    config = load([*MLP, "parallel=auto", "parallel.verify=compile", "cluster.gpus=4"])
    program, inputs = SimpleNamespace(train=step), SimpleNamespace(pool=None)
    traced = prepare.Traced(inputs, None, program, 0.0, H100)
    console = make_console(io.StringIO())
    found, why = prepare._plans_and_problem(config, console, traced, plan_only=False)
    assert [plan.method for plan in found] == [known[len(reports) - 1].method]
    assert why == ""


ANY = "parallel=data", "cluster.gpus=4", "cluster=emulated"


@pytest.mark.parametrize(
    ("predicted", "said_of_it", "more", "problem"),
    [
        (ROOM + 1, FITS, (), ""),
        (ROOM, OVER, (), "as compiled, it needs 1.00 MiB a device, 1.00 KiB more .* Fits: less"),
        (ROOM, OVER, ("parallel.allow_over_memory=true",), ""),
        (ROOM, BROKEN, ("parallel.allow_over_memory=true",), ".* do not compile for .* no tile"),
    ],
    ids=["fits after all", "does not fit after all", "allowed", "does not compile"],
)
def test_the_compiler_is_right_where_the_prediction_is_wrong(
    compiler, monkeypatch, predicted, said_of_it, more, problem
):
    step, known = plans()
    monkeypatch.setattr(prepare, "what_fits", lambda *_: "Fits: less")
    plan = dataclasses.replace(
        known[0],
        stages=tuple(dataclasses.replace(s, memory_bytes=predicted) for s in known[0].stages),
    )
    monkeypatch.setattr(prepare, "plans_of", lambda *_: [plan])
    compiler(said_of_it)
    config = load([*MLP, *ANY, "task=plan", "plan.compile=true", *more])
    program = SimpleNamespace(train=step, dataset=SimpleNamespace(describe="-"), eval_batches=0)
    inputs = SimpleNamespace(pool=None, init_from=None)
    console = make_console(io.StringIO())
    traced = prepare.Traced(inputs, None, program, 0.0, H100)
    found = prepare.plan(config, console, traced, plan_only=True)
    assert re.fullmatch(problem, found.problem)
    assert found.plan.compiled == said_of_it


@pytest.mark.devices
def test_task_plan_tells_what_the_compiler_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ("cluster=emulated", "cluster.gpus=4", "parallel=data", "run.id=one")
    assert main(["task=plan", "plan.compile=true", *MLP, *words]) == 0
    told = capsys.readouterr().out
    assert "compiling for cpu ... " in told
    assert "distinct programs compiled for cpu in " in told
    found = json.loads((tmp_path / "outputs/one/plan.json").read_text())["compiled"]
    assert found["device"] == "cpu"
    (stage,) = found["stages"]
    assert 0 < stage["state_bytes"] < stage["memory_bytes"]
    assert found["errors"] == []
    reduced = [one for program in found["programs"] for one in program["collectives"]]
    assert {(one["kind"], one["axis"]) for one in reduced} == {("all-reduce", "data")}
    page = (tmp_path / "outputs/one/report.html").read_text()
    assert "As compiled, the peak of a device" in page
    assert "Collectives in the compiled programs" in page
    replayed = ("parallel=replay", "parallel.plan=outputs/one/plan.json", "task=plan")
    assert main([*MLP, *words[:2], *replayed]) == 0


@pytest.mark.parametrize("name", ["H100-SXM5-80GB", "Mine"])
def test_programs_are_compiled_for_the_gpus_that_the_settings_describe(monkeypatch, name):
    monkeypatch.setattr("launcher.runtime.described.described_devices", lambda text, count: [text])
    device = ("compute_capability=8.9", "multiprocessors=99", "clock_ghz=1.25", "l2_mib=3")
    words = [f"cluster.device.{word}" for word in (f"name={name}", *device)]
    config = load([*MLP, "cluster=h100_8", "task=plan", "plan.compile=true", *words])
    found = compiled.compiler_of(config, prepare.shape_of(config, None, None))
    for said in ("core_count: 99", "clock_rate_ghz: 1.25", f"l2_cache_size: {3 << 20}", name):
        assert said in found.text


def test_a_missing_compiler_is_told_before_the_work_of_planning(monkeypatch):
    def absent(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", absent)
    monkeypatch.setattr(prepare, "build_program", None)  # is not reached
    config = load([*MLP, "cluster=h100_8", "task=plan", "plan.compile=true"])
    with pytest.raises(PlanError, match="cuda12-local"):
        prepare.trace(config, make_console(io.StringIO()), look(config, 0, plan_only=True))


@pytest.mark.parametrize(("cluster", "costs"), [("h100_8", True), ("emulated", False)])
def test_operations_of_a_fixed_order_say_their_price_on_gpus(
    tmp_path, monkeypatch, caplog, cluster, costs
):
    monkeypatch.chdir(tmp_path)
    words = (*MLP, f"cluster={cluster}", "cluster.gpus=8", "train.deterministic=true")
    config = load([*words, "task=plan"])
    with caplog.at_level("INFO"):
        prepare.trace(config, make_console(io.StringIO()), look(config, 0, plan_only=True))
    said = [line for line in caplog.messages if "train.deterministic=true" in line]
    assert len(said) == costs
    assert all("steps take longer than predicted" in line for line in said)
