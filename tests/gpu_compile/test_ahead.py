"""What a worker that stands by lowers without a device is what GPUs would be given."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
SCRIPT = """
import jax
from launcher.config.compose import load
from launcher.driver.planning.check import look
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.planning.prepare import trace
from launcher.report.console import make_console
from launcher.runtime import Locality
from launcher.runtime.described import target_of
from launcher.runtime.programs import compile as compiling
words = "model=gpt model.num_layers=2 model.hidden_size=64 model.dropout=0.1 train.precision=bf16"
more = "cluster=h100_8 cluster.gpus=4 parallel=zero3 task=plan train.eval_every=0"
config = load([*words.split(), *more.split()])
traced = trace(config, make_console(), look(config, 0, plan_only=True))
step = traced.program.train
plan = plan_of(config.parallel, step, traced.cluster)
gpus = Locality(0, frozenset(range(4)), (0,) * 4, None, "gpu")
ahead = compiling.lower_ahead(step, plan, gpus)
devices = target_of("h100", 4).devices
placement = compiling.place_on_devices(plan, devices, ahead.emitted.slots)
for name, program in compiling._programs(ahead.emitted, placement, {}).items():
    print(name, ahead.lowered[name].digest == program.lowered.digest)
"""


def test_a_worker_that_stands_by_lowers_the_programs_of_gpus():
    """To the text and the options, by which the compilation cache knows them."""
    command = [sys.executable, "-c", SCRIPT]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    assert {"stage.0.forward True", "stage.0.backward True", "update.0 True"} <= {*said}
    assert not [line for line in said if line.endswith(" False")]
