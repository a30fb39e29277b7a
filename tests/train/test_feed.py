"""The feeder: the right batch for each number, made ahead, errors where they belong."""

import threading

import pytest

from launcher.train.feed import Feeder


def test_batches_are_those_of_their_numbers_in_any_order_of_asking():
    feeder = Feeder(lambda k: k * k, start=3, stop=100)
    assert [feeder.get(k)[0] for k in (3, 4, 5, 20, 7)] == [9, 16, 25, 400, 49]
    feeder.close()


def test_a_batch_that_was_looked_at_is_still_there():
    made = []
    feeder = Feeder(lambda k: made.append(k) or k * k, start=3, stop=5)
    assert [feeder.peek(3), feeder.peek(3), feeder.get(3)[0], feeder.get(4)[0]] == [9, 9, 9, 16]
    feeder.close()
    assert made == [3, 4]


def test_batches_are_made_ahead_but_no_further_than_the_look_ahead_and_the_stop():
    made, third = [], threading.Event()

    def batch_at(k):
        made.append(k)
        if k == 2:
            third.set()
        return k

    feeder = Feeder(batch_at, start=0, stop=4, look_ahead=2)
    assert third.wait(10)  # 0, 1 and 2 without anybody asking
    feeder._thread.submit(lambda: None).result()
    assert made == [0, 1, 2]
    assert [feeder.get(k)[0] for k in range(4)] == [0, 1, 2, 3]
    feeder.close()
    assert made == [0, 1, 2, 3]


def test_an_error_is_raised_at_the_batch_that_it_belongs_to_and_at_no_other():
    def batch_at(k):
        if k == 1:
            raise OSError("the disk is gone")
        return k

    feeder = Feeder(batch_at, start=0, stop=10)
    assert feeder.get(0)[0] == 0
    with pytest.raises(OSError, match="the disk is gone"):
        feeder.get(1)
    assert feeder.get(2)[0] == 2
    feeder.close()


def test_the_wait_is_what_the_batch_was_late_by():
    ready = threading.Event()

    def batch_at(k):
        if k == 0:
            ready.wait(10)
        return k

    feeder = Feeder(batch_at, start=0, stop=2)
    threading.Timer(0.2, ready.set).start()
    late = feeder.get(0)[1]
    feeder._thread.submit(lambda: None).result()
    assert 0 <= feeder.get(1)[1] < late
    feeder.close()


def test_closing_stops_the_thread_without_making_what_is_left():
    started, go_on = threading.Event(), threading.Event()
    made = []

    def batch_at(k):
        started.set()
        go_on.wait(10)
        made.append(k)

    feeder = Feeder(batch_at, start=0, stop=10)
    assert started.wait(10)
    threading.Timer(0.05, go_on.set).start()
    feeder.close()
    assert made in ([0], [0, 1])  # never the whole look-ahead
    assert not any(t.name.startswith("feeder") and t.is_alive() for t in threading.enumerate())
