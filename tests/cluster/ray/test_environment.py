"""The environment variables that Ray and the workers start with."""

from pathlib import Path

from launcher.cluster.devices import DevicePool
from launcher.cluster.ray.session import ray_environment, worker_environment
from launcher.hardware.cluster_shape import memory_share
from launcher.plan import local_shape

CPUS = DevicePool("cpu", 2, 3, "emulated CPU device", "")
GPUS = DevicePool("gpu", 2, 2, "H200", "", ("4", "5", "GPU-a", "GPU-b"))


def test_cpu_workers_get_their_number_of_devices_and_keep_other_flags():
    flags = "--xla_dump_to=/x --xla_force_host_platform_device_count=8"
    environ = {"XLA_FLAGS": flags, "JAX_NUM_CPU_DEVICES": "8", "HOME": "/home/me"}
    before = dict(environ)
    variables = worker_environment(environ, CPUS, 1)
    assert environ == before
    expected = "--xla_dump_to=/x --xla_force_host_platform_device_count=3"
    assert variables["XLA_FLAGS"] == expected
    assert variables["JAX_PLATFORMS"] == "cpu"
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert variables["HOME"] == "/home/me"
    assert "JAX_NUM_CPU_DEVICES" not in variables


def test_cpu_workers_have_a_thread_more_than_devices_unless_told_otherwise():
    many = DevicePool("cpu", 2, 1000, "emulated CPU device", "")
    assert worker_environment({}, many, 0)["NPROC"] == "1001"
    assert int(worker_environment({}, CPUS, 0)["NPROC"]) >= 4
    assert worker_environment({"NPROC": "2"}, CPUS, 0)["NPROC"] == "2"


def test_gpu_workers_see_their_own_gpus_or_in_a_job_what_their_node_gives_them():
    environ, of_job = {"CUDA_VISIBLE_DEVICES": "4,5"}, DevicePool("gpu", 2, 2, "H200", "")
    pools = ((GPUS, 0, "4,5"), (GPUS, 1, "GPU-a,GPU-b"), (of_job, 1, None))
    for pool, host, seen in pools:
        variables = worker_environment(environ, pool, host)
        assert variables.get("CUDA_VISIBLE_DEVICES") == seen
        assert variables["JAX_PLATFORMS"] == "cuda,cpu"


def test_gpu_workers_have_the_memory_that_a_plan_may_fill():
    fraction, newer = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
    for pool in (GPUS, DevicePool("gpu", 2, 2, "H200", "")):
        whole = local_shape(4, 2, "H200", memory_share=1.0).memory_bytes
        for environ in ({}, {fraction: "0.5"}, {newer: "0.6"}):
            variables = worker_environment(environ, pool, 0)
            [share] = [variables[name] for name in (fraction, newer) if name in variables]
            shape = local_shape(4, 2, "H200", memory_share(environ))
            assert shape.memory_bytes == int(float(share) * whole)
            assert environ.items() <= variables.items()
    assert fraction not in worker_environment({}, CPUS, 0)


def test_workers_do_not_know_that_they_are_in_a_slurm_step():
    """JAX would give each of them a single device."""
    environ = {"SLURM_JOB_ID": "1", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"}
    for pool in (CPUS, GPUS):
        assert not any(name.startswith("SLURM_") for name in worker_environment(environ, pool, 0))


def test_only_a_ray_of_several_nodes_is_open_to_other_machines():
    variable = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    assert ray_environment({}, Path("/s/token"))[variable] == "0"
    spread = ray_environment({}, Path("/s/token"), nodes=True)
    assert (spread[variable], spread["RAY_AUTH_MODE"]) == ("1", "token")


def test_no_setting_of_another_ray_gets_in():
    environ = {"RAY_ADDRESS": "elsewhere:6379", "RAY_NAMESPACE": "theirs", "PATH": "/bin"}
    variables = ray_environment(environ, Path("/s/token"))
    assert not {"RAY_ADDRESS", "RAY_NAMESPACE"} & set(variables)
    assert variables["PATH"] == "/bin"
    assert not any(name.startswith("RAY_") for name in worker_environment(environ, CPUS, 0))


def test_this_machine_is_exempt_from_proxies():
    environ = {"http_proxy": "http://proxy:3128", "no_proxy": "example.org,localhost"}
    for variables in (
        ray_environment(environ, Path("/s/token")),
        worker_environment(environ, CPUS, 0),
    ):
        assert variables["no_proxy"] == "example.org,localhost,127.0.0.1"
        assert variables["NO_PROXY"] == "localhost,127.0.0.1"
        assert variables["http_proxy"] == "http://proxy:3128"


def test_the_other_hosts_are_exempt_from_proxies():
    variables = worker_environment({}, CPUS, 0, ["10.0.0.1", "10.0.0.2"])
    assert variables["no_proxy"] == "localhost,127.0.0.1,10.0.0.1,10.0.0.2"
