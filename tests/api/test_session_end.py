"""The end of a session, called by one thread while others wait for the workers."""

import threading

import pytest
from threads import NET, PATIENCE, batch, in_threads, step

import launcher


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("begun", [0, 4], ids=["while they connect", "while they step"])
@pytest.mark.parametrize(
    "method",
    [launcher.PipeshardParallel(num_micro_batches=2), launcher.ParameterServer()],
    ids=["pipeline", "parameter servers"],
)
def test_the_end_of_the_session_ends_the_waits_of_other_threads(method, begun):
    """Of threads that step without end the first waits for the workers, the others for it."""
    launcher.init("ray", num_nodes=2, num_devices_per_node=1)
    train = launcher.parallelize(step, method=method, donate_argnums=())
    entered, done = threading.Semaphore(0), threading.Semaphore(0)

    def endless(thread):
        entered.release()
        while True:
            float(train(NET, batch(thread))[1])
            done.release()

    found = []
    others = threading.Thread(target=lambda: found.extend(in_threads(4, endless)))
    others.start()
    for _ in range(4):
        entered.acquire()
    for _ in range(begun):
        assert done.acquire(timeout=PATIENCE)
    launcher.shutdown()
    others.join()
    assert [type(each).__name__ for each in found] == ["SessionError"] * 4, found
