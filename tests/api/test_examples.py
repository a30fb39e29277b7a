"""Each public function of the Python interface has an example, which runs."""

import doctest
import inspect

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
import launcher.nnx
import launcher.testing

MODULES = {"": launcher, "nnx.": launcher.nnx, "testing.": launcher.testing}
FUNCTIONS = {
    f"{prefix}{name}": fun
    for prefix, module in MODULES.items()
    for name in dir(module)
    if not name.startswith("_") and inspect.isfunction(fun := getattr(module, name))
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"flax": flax, "jax": jax, "jnp": jnp, "launcher": launcher, "np": np}
    (example,) = doctest.DocTestFinder(recurse=False).find(FUNCTIONS[name], name, globs=given)
    assert example.examples, "it has no example"
    runner, told = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), []
    try:
        assert runner.run(example, out=told.append).failed == 0, "".join(told)
    finally:
        launcher.shutdown()
