"""Workers in real processes under a real Ray: where they run, what comes back, how they fail."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from listening import ports

from launcher.cluster.devices import emulated_pool
from launcher.cluster.errors import WorkerError
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.cluster.ray.worker import gather
from launcher.cluster.worker_group import diagnose
from launcher.config.cluster import Emulated


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def session(logs):
    """Two hosts with two devices each."""
    with PrivateRay(emulated_pool(Emulated(gpus=4, hosts=2)), logs) as session:
        yield session


@pytest.fixture(scope="module")
def workers(session, probe):
    return session.spawn(probe)


def own_processes():
    """Every process below this one: the head, Ray's own and the workers."""
    return psutil.Process().children(recursive=True)


def test_each_host_is_a_process_with_its_own_cpu_devices(workers):
    places = [worker.submit("place").result() for worker in workers]
    assert len({place["pid"] for place in places} | {os.getpid()}) == 3
    assert [worker.name for worker in workers] == ["worker_0", "worker_1"]
    for worker, place in zip(workers, places, strict=True):
        assert (place["jax"], place["platforms"]) == (False, "cpu")  # set before any import
        assert psutil.Process(place["pid"]).nice() == psutil.Process().nice()
        assert worker.submit("devices").result() == ["cpu", "cpu"]


def test_a_worker_gets_the_driver_s_folder_search_path_and_variables(
    session, probe, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("LAUNCHER_TEST", "here")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # which Ray would set to 1
    worker = session.spawn(probe)[1]
    place = worker.submit("place").result()
    assert place["folder"] == str(tmp_path)
    assert place["path"][: len(sys.path)] == [os.path.abspath(entry) for entry in sys.path]
    assert worker.submit("variable", "LAUNCHER_TEST").result() == "here"
    assert worker.submit("variable", "OMP_NUM_THREADS").result() is None
    flags = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=2"
    assert worker.submit("variable", "XLA_FLAGS").result() == flags


def test_calls_run_in_the_order_of_their_submission(session, probe):
    worker = session.begin(probe, 100)[0]  # whose process need not be up
    futures = [worker.submit("add", number) for number in range(50)]
    assert session.spawn(probe, 100)[0] is worker
    expected = [100 + sum(range(number + 1)) for number in range(50)]
    assert [future.result() for future in futures] == expected
    assert futures[3].result() == expected[3]  # a result can be asked for again


def test_a_submission_does_not_wait_for_the_call(workers, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    future = workers[0].submit("wait", str(pipe))  # blocks in the worker until we write
    after = workers[0].submit("add", 0)
    with pytest.raises(TimeoutError, match=r"worker_0: wait is still running after 0\.1 s"):
        future.result(timeout=0.1)
    pipe.write_text("go")
    assert future.result() == "go"
    assert isinstance(after.result(), int)


def test_an_exception_comes_back_as_text_and_the_worker_goes_on(workers):
    with pytest.raises(WorkerError) as error:
        workers[1].submit("fail").result()
    told = error.value
    assert (told.worker, told.died) == ("worker_1", False)
    assert (told.error_type, told.error_message) == ("Broken", "broken: on purpose")
    assert told.summary == "worker_1 failed: Broken: broken: on purpose"
    assert 'raise Broken("on purpose")' in told.traceback_text
    assert "host.py" not in told.traceback_text
    assert workers[1].submit("take").result() == "alive"


def test_a_failed_constructor_answers_every_call(session, probe):
    worker = session.spawn(probe, None)[0]
    for _ in range(2):
        with pytest.raises(WorkerError, match="Broken: broken: no start"):
            worker.submit("add", 1).result()


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_worker(workers):
    with pytest.raises(WorkerError, match="lock") as error:
        workers[0].submit("unpicklable").result()
    assert not error.value.died


def test_a_worker_s_output_goes_to_its_log_alone(workers, capfd):
    workers[1].submit("say", "a line of output").result()
    assert workers[1].log.read_text().endswith("a line of output\nand an error\n")
    assert capfd.readouterr() == ("", "")


def test_signals_do_not_end_a_worker(workers):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    assert workers[0].submit("take", *numbers).result() == "alive"


@pytest.mark.parametrize("how", ["take", "end"])
def test_a_dead_worker_is_an_error_with_its_last_lines(session, probe, capfd, how):
    worker, other = session.spawn(probe)
    worker.submit("say", "doing well").result()
    dying = worker.submit(how, {"take": signal.SIGKILL, "end": 3}[how])
    for future in (dying, worker.submit("add", 1)):
        with pytest.raises(WorkerError) as error:
            future.result()
        assert error.value.died
        assert error.value.summary.startswith("worker_0 died: its process")
        assert "doing well" in error.value.log_tail
    assert ("last words" in str(error.value)) == (how == "end")
    assert other.submit("take").result() == "alive"
    assert capfd.readouterr() == ("", "")  # Ray has nothing to add


def test_a_failure_that_follows_from_a_death_is_told_as_the_death(session, probe):
    """Also where the one that died had answered by then; not where it is well."""
    worker, other = session.spawn(probe)
    for died in (False, True):
        answered, failed = worker.submit("take"), other.submit("fail")
        answered.result()
        if died:
            with pytest.raises(WorkerError):
                worker.submit("end", 3).result()
        with pytest.raises(WorkerError) as error:
            gather([answered, failed])
        assert error.value.died is died
        assert error.value.worker == ("worker_0" if died else "worker_1")


def test_a_worker_on_another_machine_is_examined_there(session, probe, tmp_path, monkeypatch):
    """Here another machine is one that the driver takes for one: Ray finds the node."""
    worker, _ = session.spawn(probe)
    worker.submit("add", 1).result()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    worker.submit("wait", str(pipe))
    pid = worker.process().pid
    worker._process, worker.elsewhere = None, True
    while psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
        time.sleep(0.01)
    first, *lines = diagnose(worker).splitlines()
    assert first.startswith("its process waits")
    assert first.endswith(f"; its stacks (all threads: {worker.log}):")
    assert any(line.endswith(" in wait") for line in lines)
    monkeypatch.setattr("launcher.cluster.worker_group._DIAGNOSIS_SECONDS", 0.0)
    assert diagnose(worker) == (
        "its process is on another machine, whose state is unknown: "
        "its node did not answer within 0 s"
    )


def test_ray_listens_on_this_machine_alone(workers):
    assert {ip for ip, _ in ports([*own_processes(), psutil.Process()])} == {"127.0.0.1"}


def test_the_secret_is_in_no_command_line_environment_or_log(workers, logs):
    processes = own_processes()
    secret = Path(processes[0].environ()["RAY_AUTH_TOKEN_PATH"]).read_text()
    assert len(secret) == 64
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            assert secret not in " ".join(process.cmdline())
            assert secret not in str(process.environ())
    assert not any(secret in path.read_text() for path in logs.iterdir())
