"""Devices of a run, by the kind of its cluster, and the line about them."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from launcher.cli import outcome
from launcher.cluster import devices, kinds
from launcher.cluster.devices import (
    DevicePool,
    Gpus,
    emulated_pool,
    find_gpus,
    local_pool,
)
from launcher.cluster.kinds import find_devices
from launcher.cluster.ray.session import StartLimit
from launcher.cluster.slurm.allocation import Allocation
from launcher.config.cluster import CLUSTERS, Emulated, Local, Slurm, SlurmCluster
from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.driver.planning import check
from launcher.driver.planning.prepare import shape_of
from launcher.stop import Stop
from launcher.submit.sweep import find_slots

ALLOCATION = Allocation("7", 0, 0, ("a", "b"), 0)
TWO = Gpus(("NVIDIA H200", "NVIDIA H200"))


def emulated(**settings):
    return emulated_pool(Emulated(**settings))


def local(found, visible=None, **settings):
    return local_pool(Local(**settings), found, visible)


def test_emulated_devices_are_four_unless_said_otherwise_and_spread_evenly_over_hosts():
    note = "4 emulated CPU devices, as asked"
    assert emulated() == DevicePool("cpu", 1, 4, "emulated CPU device", note)
    assert emulated(gpus=1).note == "1 emulated CPU device, as asked"
    pool = emulated(gpus=6, hosts=3)
    assert (pool.hosts, pool.devices_per_host, pool.num_devices) == (3, 2, 6)
    assert pool.note == "6 emulated CPU devices on 3 emulated hosts, as asked"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"gpus": 6, "hosts": 4}, "cluster.gpus=6 cannot be divided over cluster.hosts=4"),
        ({"gpus": None, "hosts": 3}, "cluster.gpus=4 cannot be divided over cluster.hosts=3"),
    ],
)
def test_devices_that_do_not_divide_over_hosts_are_refused(settings, problem):
    with pytest.raises(ConfigError) as error:
        emulated(**settings)
    assert error.value.problem == problem
    assert f"a multiple of {settings['hosts']}" in error.value.remedy


def test_local_takes_all_gpus_or_the_first_few_and_names_every_kind():
    assert local(TWO).gpu_ids == ("0", "1")
    assert local(TWO).note == "2 GPUs: NVIDIA H200"
    pool = local(TWO, gpus=1)
    assert (pool.kind, pool.devices_per_host, pool.gpu_ids) == ("gpu", 1, ("0",))
    assert local(Gpus(("A100", "T4", "A100"))).device_name == "A100, T4"


class Cuda:
    """Two GPUs, as CUDA's driver answers."""

    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = 2

    def cuDeviceGetName(self, name, size, device):
        name.value = (b"NVIDIA A10G", b"Tesla T4")[device]

    def cuDeviceGetAttribute(self, number, attribute, device):
        number._obj.value = {75: (8, 7), 76: (6, 5)}[attribute][device]


def test_cuda_says_what_the_gpus_can_compute(monkeypatch, capsys):
    monkeypatch.setattr("ctypes.CDLL", lambda name: Cuda())
    exec(devices._PROBE, {})
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "names": ["NVIDIA A10G", "Tesla T4"],
        "problem": "",
        "capabilities": [8.6, 7.5],
    }
    gpus = Gpus(tuple(found["names"]), "", tuple(found["capabilities"]))
    assert [local(gpus, gpus=n).compute_capability for n in (1, 2)] == [8.6, 7.5]  # the least
    assert kinds.pool_shape(local(gpus, gpus=1)).compute_capability == 8.6
    assert local(TWO).compute_capability is None
    assert kinds.pool_shape(local(TWO)).compute_capability == 9.0  # its datasheet's


@pytest.mark.parametrize("visible", ["3,1", "GPU-8932f937,GPU-aa", "3, 1,-1,0"])
def test_gpus_keep_the_names_that_cuda_visible_devices_gives_them(visible):
    entries = [entry.strip() for entry in visible.split(",")]
    assert local(TWO, visible).gpu_ids == tuple(entries[:2])
    assert local(TWO, visible, gpus=1).gpu_ids == tuple(entries[:1])


@pytest.mark.parametrize(
    ("gpus", "note"),
    [
        (Gpus(), "no GPU here: 4 emulated CPU devices stand in"),
        (
            Gpus(problem="JAX_PLATFORMS=cpu hides them"),
            "no GPU to use here (JAX_PLATFORMS=cpu hides them): 4 emulated CPU devices stand in",
        ),
        (
            Gpus(("NVIDIA H200",), "JAX has no CUDA plugin (pip install 'jax[cuda12]')"),
            "1 GPU here (NVIDIA H200), but JAX has no CUDA plugin (pip install 'jax[cuda12]'): "
            "4 emulated CPU devices stand in",
        ),
    ],
)
def test_cpu_devices_stand_in_where_no_gpu_can_be_used(gpus, note):
    pool = local(gpus)
    assert (pool.kind, pool.num_devices, pool.gpu_ids) == ("cpu", 4, ())
    assert pool.note == note


@pytest.mark.parametrize(
    ("asked", "stand"), [(1, "1 emulated CPU device stands"), (8, "8 emulated")]
)
def test_as_many_cpu_devices_stand_in_as_are_asked_for(asked, stand):
    pool = local(Gpus(), gpus=asked)
    assert (pool.kind, pool.num_devices) == ("cpu", asked)
    assert f": {stand}" in pool.note


@pytest.mark.parametrize(
    ("gpus", "asked", "message"),
    [
        (
            TWO,
            3,
            "cluster.gpus=3, but this machine has 2 GPUs. "
            "Set cluster.gpus=2 or less, or cluster=emulated for CPU devices in their place.",
        ),
        (
            Gpus(),
            1000,
            "cluster.gpus=1000, but there is no GPU here, and at most 64 emulated CPU devices "
            "stand in. Set cluster.gpus=64 or less; to plan for a cluster that is not here, "
            "describe it (task=plan cluster=h100_8_x16).",
        ),
        (
            Gpus(("NVIDIA H200",), "JAX has no CUDA plugin"),
            1,
            "cluster.gpus=1: 1 GPU here (NVIDIA H200), but JAX has no CUDA plugin. "
            "Fix that, or set cluster=emulated for 1 emulated CPU device.",
        ),
    ],
)
def test_more_devices_than_the_machine_has_are_refused(gpus, asked, message):
    with pytest.raises(ConfigError) as error:
        local(gpus, gpus=asked)
    assert str(error.value) == message
    assert error.value.keys == ("cluster.gpus",)


@pytest.fixture
def on_slurm(monkeypatch):
    """The devices of a job with some GPUs on this node; None: the job is not submitted."""

    def pool(found, slurm=None, **settings):
        monkeypatch.setattr(kinds, "find_gpus", lambda environ: found)
        monkeypatch.setattr(kinds, "find_allocation", lambda environ: found and ALLOCATION)
        return find_devices(SlurmCluster(slurm=slurm or Slurm(), **settings))

    return pool


def test_a_job_has_as_many_gpus_on_each_node_and_the_node_says_which(on_slurm):
    pool = on_slurm(TWO, gpus=4, hosts=2)
    assert pool == DevicePool("gpu", 2, 2, "NVIDIA H200", "4 GPUs on 2 Slurm nodes: NVIDIA H200")
    assert on_slurm(None, gpus=4, hosts=2).note == "4 GPUs on 2 Slurm nodes"  # to be submitted
    assert on_slurm(None, Slurm(emulated=True), gpus=4, hosts=2).kind == "cpu"  # as asked for


def test_a_node_with_fewer_gpus_than_the_run_wants_is_refused(on_slurm, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    with pytest.raises(ConfigError) as raised:
        on_slurm(TWO, gpus=6, hosts=2)
    assert str(raised.value) == (
        "node7 gives this job 2 GPUs, but 3 are needed on each node. Set cluster.gpus to what "
        "the nodes have in total, or cluster.slurm.emulated=true for CPU devices."
    )


def test_a_kind_of_cluster_is_one_class_and_one_file(tmp_path, monkeypatch):
    """Rented machines: settings, devices, shape, start and submission, from outside the package."""
    monkeypatch.setattr(kinds, "KINDS", dict(kinds.KINDS))
    monkeypatch.setitem(CLUSTERS, "rented", None)  # which is undone afterwards
    del CLUSTERS["rented"]

    @kinds.register
    class Rented(kinds.ClusterKind):
        name, batch = "rented", "rented_jobs"

        def pool(self, *, planning=False):
            return DevicePool("cpu", self.cluster.hosts, 2, "rented device", "")

        def start(self, pool, logs, limit, rendezvous=None):
            return f"a Ray of {pool.hosts} hosts"

    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "rented.yaml").write_text("kind: rented\nhosts: 2\n")
    config = load(["recipe=smoke", "cluster=rented", "parallel=data"], [str(tmp_path)])
    kind = kinds.kind_of(config.cluster)
    pool = check.find_pool(config, plan_only=False)
    assert pool == kind.pool()
    assert shape_of(config, pool, None).num_devices == 4
    assert kind.start(pool, tmp_path, StartLimit()) == "a Ray of 2 hosts"
    jobs = SimpleNamespace(submit=lambda config, stop: len(config.cluster.kind))
    monkeypatch.setitem(sys.modules, "rented_jobs", jobs)
    words = ["recipe=smoke", "cluster=rented", "parallel=data", f"--config-dir={tmp_path}"]
    assert outcome.run(words, Stop()) == len("rented")
    with pytest.raises(ConfigError, match="jobs=2, but cluster=rented has one set"):
        find_slots([replace(config, sweep=replace(config.sweep, jobs=2))], {})


def test_finding_devices_loads_neither_jax_nor_ray():
    before = set(sys.modules)
    assert find_devices(Emulated(gpus=2)).num_devices == 2
    find_gpus({"JAX_PLATFORMS": "cpu"})
    assert not {"jax", "ray"} & (set(sys.modules) - before)
