"""Processes of one machine find one another, meet, and get memory in common; here, threads do."""

import errno
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from launcher.runtime.transport import neighbours
from launcher.runtime.transport.neighbours import Circle, EndedError, find_neighbours

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")
SECONDS = 60


def together(count, fun):
    """What `fun(number, gather)` returns in each of `count` threads."""
    texts, barrier = [""] * count, threading.Barrier(count)

    def of(number):
        def gather(own):
            texts[number] = own
            barrier.wait(SECONDS)
            return list(texts)

        return fun(number, gather)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(of, range(count), timeout=SECONDS))


@pytest.fixture
def found():
    """The neighbours of each of three."""
    found = together(3, find_neighbours)
    yield found
    for peers in found:
        for peer in peers.values():
            peer.close()


def circles(found, members=(0, 1, 2)):
    return [Circle(me, members, found[me]) for me in members]


def at_once(funs):
    with ThreadPoolExecutor(len(funs)) as pool:
        futures = [pool.submit(fun) for fun in funs]
        return [future.exception(SECONDS) or future.result() for future in futures]


def test_each_pair_is_connected(found):
    for me, peers in enumerate(found):
        assert sorted(peers) == [i for i in range(3) if i != me]
        for i, peer in peers.items():
            peer.sendall(bytes([me, i]))
    for me, peers in enumerate(found):
        assert {i: peer.recv(2) for i, peer in peers.items()} == {i: bytes([i, me]) for i in peers}


def test_processes_of_other_machines_are_left_out(monkeypatch):
    place = threading.local()
    monkeypatch.setattr(neighbours, "_place", lambda: place.name)

    def find(number, gather):
        place.name = "here" if number != 1 else "there"
        return find_neighbours(number, gather)

    assert [sorted(peers) for peers in together(3, find)] == [[2], [], [0]]


def test_another_users_process_is_not_let_in(monkeypatch):
    ours, theirs = socket.socketpair()
    assert neighbours._is_mine(ours)
    assert neighbours._is_mine(theirs)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert not neighbours._is_mine(ours)


def test_nobody_passes_a_meeting_before_all_have_come(found):
    came, early = [], []

    def late(circle):
        def come():
            if circle.rank == 2:
                released.wait(SECONDS)
            came.append(circle.rank)
            circle.meet()
            early.extend(sorted({0, 1, 2} - set(came)))

        return come

    released = threading.Event()
    threading.Timer(0.2, released.set).start()
    assert at_once([late(circle) for circle in circles(found)]) == [None] * 3
    assert early == []


def test_memory_is_the_same_zeros_for_all_members_and_has_no_name(found):
    before = os.listdir("/dev/shm")
    pair = circles(found, (0, 2))
    first, second = at_once([lambda c=c: c.memory(5000) for c in pair])
    assert (first[:], second[:]) == (bytes(5000), bytes(5000))
    second[4999] = 7
    assert first[4999] == 7
    assert os.listdir("/dev/shm") == before


def test_if_there_is_no_memory_all_members_are_told(found, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))
    monkeypatch.setattr(os, "ftruncate", full)
    first, *others = at_once([lambda c=c: c.memory(5000) for c in circles(found)])
    assert first.errno == errno.ENOMEM
    assert all(isinstance(other, EndedError) for other in others)


def test_who_waits_is_told_who_has_ended(found):
    for peer in found[1].values():
        peer.close()
    for circle in circles(found, (0, 1)), circles(found):
        with pytest.raises(EndedError, match=r"^process 1 of this run has ended"):
            circle[0].meet()
    with pytest.raises(EndedError, match=r"^process 1 of this run has ended"):
        circles(found, (1, 2))[1].memory(64)
