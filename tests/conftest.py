"""What holds for every test: emulated CPU devices, wherever the tests run, and no network.

Tests outside of `PURE` are `devices`; a test in there that starts a process or compiles a plan's
program all the same needs that mark, or fails. If a test is `sampled(n)`, every n-th of its cases
belongs to its tier, the default one or `slow`, and the rest to `stress`.
"""

import collections
import gc
import multiprocessing.process
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

# Before any test imports JAX, which reads them once.
os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile far more than they compute: XLA:CPU's own optimizations and its newer code generator
# would take two thirds of their time, and a program cut into 32 modules a fifth of the rest. What
# the programs hold and in which order is decided before.
# XLA aborts at a flag that it does not know.
_OLD_EMITTERS = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib") < "0.11" else ""
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_force_host_platform_device_count=8" + _OLD_EMITTERS
)
os.environ["WANDB_MODE"] = "offline"
# What was measured on this machine before must not decide what tests see. The processes of one run
# of tests share what they compile.
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
os.environ["XDG_CACHE_HOME"] = f"{tempfile.gettempdir()}/launcher-tests-{_RUN}"
# Its list of this machine's fonts takes seconds: made once, not once a process of tests.
os.environ["MPLCONFIGDIR"] = f"{tempfile.gettempdir()}/launcher-tests-matplotlib-{os.getuid()}"
# Each process of a test would make the same bytecode of hundreds of modules anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A script's background ignores it, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
PURE = (
    *("arrays", "config", "hardware", "partition", "plan", "recipes", "report"),
    *("schedule", "trace"),
)
ON_DEMAND = "slow", "stress", "slurm", "gpu_compile"  # run where `-m` names them
# What starts a process, which patches watch: each `id` of an object would call an audit hook.
STARTING = (
    *((subprocess.Popen, "__init__"), (os, "system"), (os, "posix_spawn"), (os, "fork")),
    *((os, "forkpty"), (multiprocessing.process.BaseProcess, "start")),
)
_MOST_AT_ONCE = 5  # each compiles on all cores; more wait for one another


def pytest_xdist_auto_num_workers(config):
    """How many processes run tests: one more than there are cores, since tests of processes wait
    more than they compute; but none beside this one for a file or two."""
    named = [argument for argument in config.args if ".py" in argument]
    return 0 if 0 < len(named) <= 2 else min(len(os.sched_getaffinity(0)) + 1, _MOST_AT_ONCE)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """What collecting makes, thousands of tests and all modules, stays: it is not looked through
    for what is no longer needed, neither meanwhile, a sixth of the time, nor ever after. Tests
    themselves make millions of objects that stay, as a run does."""
    gc.set_threshold(50_000)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark what needs devices; leave out what is to be asked for."""
    _sample(items)
    asked = config.option.markexpr
    left_out = {name for name in ON_DEMAND if name not in asked}
    kept, others = [], []
    for item in items:
        if item.path.relative_to(HERE).parts[0] not in PURE:
            item.add_marker("devices")
        marks = {mark.name for mark in item.iter_markers()}
        if "stress" in marks:
            marks.discard("slow")
        (others if marks & left_out else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


def _sample(items):
    """Mark what `sampled` leaves out of a tier, in which a parameter may have put a case."""
    seen = collections.Counter()
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is None:
            continue
        own = tuple(one.name for one in item.callspec.marks if one.name in ON_DEMAND)
        of = item.path, item.originalname, own
        if seen[of] % mark.args[0]:
            item.add_marker(mark.kwargs.get("rest", "stress"))
        seen[of] += 1


@pytest.fixture(scope="session", autouse=True)
def _settings_are_parsed_once():
    """The files of `conf`: PyYAML's own parser and OmegaConf are a third of composing."""
    from omegaconf import OmegaConf

    known, load = {}, OmegaConf.load

    def load_once(file):
        if not hasattr(file, "seek"):
            with open(file, encoding="utf-8") as opened:
                return load_once(opened)
        start, text = file.tell(), file.read()
        if text not in known:
            file.seek(start)  # the file itself, whose name errors tell
            known[text] = pickle.dumps(load(file))
        return pickle.loads(known[text])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", load_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _programs_are_not_kept():
    """What one test compiles decides nothing for the next. A run in a process of tests would also
    turn JAX's cache on for the rest: it reads the size and age of all entries for each new one,
    a quarter of the time in the end, and one process of tests waits for the others' lock."""
    import jax

    jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture(scope="session", autouse=True)
def _nominal_rates_are_kept():
    """Plans rest on nominal rates, as if a calibration had found them: no test measures this
    machine that does not mean to."""
    from launcher.base import measurements
    from launcher.hardware.cluster_shape import local_shape
    from launcher.plan.profile.calibration import cached_calibration

    for count in range(1, 65):
        shape = local_shape(count, 1, "cpu")
        rates = {
            "product_flops": {"bfloat16": {"1": shape.flops}, "float32": {"1": shape.flops_fp32}},
            "memory_bandwidth": shape.memory_bandwidth,
            "effective_parallelism": shape.effective_parallelism,
            "product_parallelism": shape.product_parallelism,
            "dispatch_overhead": shape.dispatch_overhead,
            "collectives": [],
            "memory_bytes": None,
            "overrun": 1.0,
            "attention_flops": None,
            "launch_seconds": 0.0,
        }
        measurements.write(measurements.cache_file("calibration", "cpu", count), rates)
    assert cached_calibration(shape)  # else each test that plans would measure


@pytest.fixture(scope="session", autouse=True)
def _no_other_process_counts():
    """Predictions are those of a quiet machine, whatever else it does."""
    with pytest.MonkeyPatch.context() as patch:
        check = import_module("launcher.driver.planning.check")
        patch.setattr(check, "threads_at_work", lambda: 0.0)
        yield


class _NoPlots:
    """In the place of the process that imports matplotlib and draws a plan: an empty file."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def draw(self, timeline, path, title, step_seconds):
        path.parent.mkdir(exist_ok=True)
        path.touch()

    def wait(self):
        pass


@pytest.fixture(scope="session", autouse=True)
def _plans_are_not_drawn():
    """Half of the time of `task=plan`; `tests/report/pages` and whole runs draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("launcher.driver.run"), "PlotProcess", _NoPlots)
        yield


@pytest.fixture
def said():
    """The lines for the user, of this package alone: `caplog` has those of every library."""
    from launcher.base.output import lines_to

    lines: list[str] = []
    with lines_to(lines.append):
        yield lines


_found: list[str] | None = None  # what a pure test has done that it must not


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    """Watch a pure test, its fixtures included, which a wrapper around it sees, too."""
    global _found
    if item.get_closest_marker("devices") is None:
        _found = []
        item._undo_watch = _watched()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    global _found
    try:
        return (yield)
    finally:
        found, _found = _found, None
        if found is not None:
            item._undo_watch()
        if found:
            pytest.fail(f"A test without the mark `devices` {found[0]}", pytrace=False)


def _watched():
    """Note processes that are started, and compiling ahead of time, as plans' programs are
    compiled; returns what ends that."""
    patch = pytest.MonkeyPatch()

    def noting(owner, name, words):
        real = getattr(owner, name)

        def noted(*args, **kwargs):
            if _found is not None:
                _found.append(words)
            return real(*args, **kwargs)

        patch.setattr(owner, name, noted)

    for owner, name in STARTING:
        noting(owner, name, f"starts a process: {owner.__name__}.{name}")
    if "jax" in sys.modules:
        noting(sys.modules["jax"].stages.Lowered, "compile", "compiles a program for devices")
    return patch.undo
