"""Runs and scripts on a Ray that somebody else has started: they come, end, and leave it as it was.

One `ray start` serves the module.
"""

import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from disturbed import MODEL, SLOW, STEPS, WORDS, assert_as_undisturbed
from launched import Launcher, lines, losses, summary

import launcher
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray import ray_compat

ENDLESS = f"train.steps={1000 * STEPS}", "train.checkpoint.every_steps=0"
SECONDS = 120  # for Ray to come up, and to notice an end


@dataclass(frozen=True)
class Somebodys:
    """A Ray of somebody else: four CPUs and one `my_node`."""

    address: str
    process: psutil.Process

    def workers(self) -> list[psutil.Process]:
        """The processes of anybody's actors and tasks there, and what they have started."""
        below = self.process.children(recursive=True)
        found = [p for p in below if self._is_worker(p)]
        return found + [child for p in found for child in p.children(recursive=True)]

    def wait_until_empty(self) -> None:
        """Wait until nothing of a run is left there, and all its resources are free."""
        deadline = time.monotonic() + SECONDS
        while (left := self.workers()) or not self._is_free():
            assert time.monotonic() < deadline, left
            time.sleep(0.5)

    def _is_worker(self, process: psutil.Process) -> bool:
        try:
            return process.name().startswith("ray::Worker")
        except psutil.Error:  # gone
            return False

    def _is_free(self) -> bool:
        done = subprocess.run(
            [sys.executable, "-c", _FREE, self.address],
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS,
        )
        return done.stdout.strip() == "True"


_FREE = """
import sys, logging, ray
ray.init(sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
free, there = ray.available_resources(), ray.cluster_resources()
names = "CPU", "my_node"
states = {group["state"] for group in ray.util.placement_group_table().values()}
print(all(free.get(name) == there[name] for name in names) and states <= {"REMOVED"})
"""


def on_it(somebodys: Somebodys, *words: str) -> list[str]:
    """These settings, on that Ray."""
    others = [word for word in words if not word.startswith("cluster=")]
    return [*others, "cluster=ray", f"cluster.address={somebodys.address}"]


@pytest.fixture(scope="module")
def somebodys() -> Iterator[Somebodys]:
    folder = Path(tempfile.mkdtemp(prefix="r"))  # short, for the sockets below it
    words = ["start", "--block", "--head", "--port=0", "--num-cpus=4", "--num-gpus=0"]
    words += [f"--temp-dir={folder}", '--resources={"my_node": 1}', "--disable-usage-stats"]
    words += ["--include-dashboard=false", "--dashboard-agent-listen-port=0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_worker_niceness", "0")
        with (folder / "output").open("w") as output:
            ray = subprocess.Popen(
                [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *words],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        try:
            address, deadline = folder / "ray_current_cluster", time.monotonic() + SECONDS
            while not (address.exists() and address.read_text().strip()):
                assert ray.poll() is None, (folder / "output").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield Somebodys(address.read_text().strip(), psutil.Process(ray.pid))
        finally:
            alive = ray.poll() is None
            below = psutil.Process(ray.pid).children(recursive=True) if alive else []
            ray.terminate()
            ray.wait(SECONDS)
            for process in psutil.wait_procs(below, timeout=10)[1]:
                process.kill()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_nothing_stays(
    somebodys: Somebodys, tmp_path: Path, undisturbed
) -> None:
    run = tmp_path / "outputs" / "one"
    asked = "cluster.hosts=2", "cluster.num_cpus=1", "cluster.resources={my_node: 0.5}"
    launched = Launcher(tmp_path, *on_it(somebodys, *WORDS, *SLOW), *asked)
    launched.wait_for(lambda: len(lines(run)) > 12)
    workers = [p for p in somebodys.workers() if p.name().startswith("ray::Worker")]
    assert len(workers) == 2
    workers[1].kill()
    code, out, err = launched.end()
    assert code == 0, err
    assert f"on the Ray at {somebodys.address}: 2 times emulated CPU device, 2 workers" in out
    assert re.search(r"worker_[01] on \S+ died: its process was killed", err)
    assert summary(run)["restarts"] == 1
    assert_as_undisturbed(run, undisturbed(*WORDS, *SLOW, "cluster.hosts=2"))
    assert {path.name for path in (run / "logs").iterdir()} >= {"worker_0.log", "worker_1.log"}
    somebodys.wait_until_empty()


@pytest.mark.stress
def test_a_node_that_leaves_costs_the_run_a_host(
    somebodys: Somebodys, tmp_path: Path, undisturbed
) -> None:
    others = "parallel", "optimizer"
    words = [word for word in (*WORDS, *SLOW) if not word.startswith(others)]
    words += ["parallel=data", "optimizer.learning_rate=0.001", "optimizer.eps=0.1"]
    asked = "cluster.hosts=2", "cluster.resources={my_node: 1}", "cluster.wait_for_host=5"
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
    command += ["--block", f"--address={somebodys.address}", '--resources={"my_node": 1}']
    command += ["--num-gpus=0", "--disable-usage-stats", "--dashboard-agent-listen-port=0"]
    with (tmp_path / "node").open("w") as output:
        node = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        while "Ray runtime started" not in (tmp_path / "node").read_text():
            assert node.poll() is None, (tmp_path / "node").read_text()
            time.sleep(0.2)
        launched = Launcher(tmp_path, *on_it(somebodys, *words), *asked)
        run = tmp_path / "outputs" / "one"
        launched.wait_for(lambda: len(lines(run)) > 8)
    finally:
        for process in [node, *node.children(recursive=True)]:
            process.kill()
        node.wait()
    code, out, err = launched.end()
    assert code == 0, err
    assert re.search(r"1 of 2 hosts is left: 1 stage of 1x1, .*; it fits, .*; from step \d+\n", out)
    alone = undisturbed(*words)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-6, abs=1e-6)
    somebodys.wait_until_empty()


@pytest.mark.slow
def test_nothing_stays_of_a_launcher_that_is_killed(somebodys: Somebodys, tmp_path: Path) -> None:
    launched = Launcher(tmp_path, *on_it(somebodys, *WORDS, *SLOW, *ENDLESS, "cluster.num_cpus=2"))
    launched.wait_for(lambda: len(lines(tmp_path / "outputs" / "one")) > 2)
    worker = somebodys.workers()[0]
    worker.suspend()  # a stopped one, too
    launched.process.send_signal(signal.SIGKILL)
    launched.end()
    somebodys.wait_until_empty()


@pytest.mark.slow
def test_what_a_run_cannot_have_there_is_one_line(somebodys: Somebodys, tmp_path: Path) -> None:
    never = "cluster.resources={no_such: 1}"
    code, _, err = Launcher(tmp_path, *on_it(somebodys, *MODEL, never)).end()
    assert code == 1
    assert "demands no_such: 1, which this Ray can never give" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_script_gets_what_it_demands_or_hears_what_is_missing(somebodys: Somebodys) -> None:
    ray_compat.import_ray()  # with the secret of this Ray, as its settings are read once
    ray_compat.read_settings_again()
    nodes = {"num_nodes": 2, "num_devices_per_node": 1, "address": somebodys.address}
    demands = {"num_cpus": 1, "resources": {"my_node": 0.25}}

    def given() -> dict[str, float]:
        import ray

        return ray.get_runtime_context().get_assigned_resources()

    launcher.init("ray", **nodes, **demands)
    assert launcher.foreach_worker(given) == [{"CPU": 1.0, "my_node": 0.25}] * 2
    launcher.shutdown()
    with pytest.raises(ClusterError, match="demands no_such: 1, which this Ray can never give"):
        launcher.init("ray", **nodes, resources={"no_such": 1})
    ray = ray_compat.import_ray()
    ray.init(somebodys.address, log_to_driver=False)  # from here on the workers run on this one
    try:
        held = ray.util.placement_group([{"my_node": 0.75}])
        assert held.wait(SECONDS)
        with pytest.raises(ClusterError, match=r"free now are CPU: 4, my_node: 0\.25 in all"):
            launcher.init("ray", **nodes, **demands, start_timeout=2)
        ray.util.remove_placement_group(held)
        launcher.init("ray", **nodes, **demands)  # the session before has left nothing
        assert len(launcher.workers()) == 2
        launcher.shutdown()
        assert ray.is_initialized()
    finally:
        ray.shutdown()
    somebodys.wait_until_empty()


@pytest.mark.stress
def test_a_run_ends_with_the_ray_that_it_is_on(somebodys: Somebodys, tmp_path: Path) -> None:
    """The last one here: it ends that Ray."""
    launched = Launcher(tmp_path, *on_it(somebodys, *WORDS, *SLOW, *ENDLESS))
    launched.wait_for(lambda: len(lines(tmp_path / "outputs" / "one")) > 2)
    for process in somebodys.process.children(recursive=True):
        if process.name() in ("raylet", "gcs_server"):
            process.kill()
    code, _, err = launched.end()
    assert code == 1
    assert "Traceback" not in err
    told = f"launcher: no Ray can be reached at {somebodys.address}: Connection refused; "
    assert err.splitlines()[-1].startswith(told)
