"""How workers come to know one another, of which two objects in this process stand in for two."""

import ast
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import launcher
from launcher.cluster import process_group, worker_group
from launcher.cluster.process_group import Peer
from launcher.driver.workers import Workers
from launcher.runtime import PermuteTransport, PullTransport

ADDRESS = "127.0.0.1"


@pytest.fixture
def handles(monkeypatch):
    """What the driver has of two workers; a call is over when it is made."""
    answers = lambda futures, watch, servers: [future.answer for future in futures]  # noqa: E731
    monkeypatch.setattr(worker_group, "gather", answers)
    monkeypatch.setattr(process_group, "keep_compiled", lambda: None)
    monkeypatch.setattr(process_group, "join_processes", lambda *group: None)

    def handle(host):
        worker = Peer()

        def submit(method, *arguments):
            return SimpleNamespace(method=method, answer=getattr(worker, method)(*arguments))

        return SimpleNamespace(host=host, address=ADDRESS, submit=submit, worker=worker)

    return [handle(0), handle(1)]


@pytest.mark.parametrize(
    ("asked", "platform", "used"),
    [
        ("auto", "cpu", PullTransport),
        ("auto", "gpu", PermuteTransport),
        ("pull", "cpu", PullTransport),
        ("collective", "cpu", PermuteTransport),
    ],
)
def test_the_way_between_them_goes_by_what_was_asked_and_by_the_devices(
    handles, monkeypatch, caplog, asked, platform, used
):
    caplog.set_level("INFO", "launcher")
    if platform != "cpu":
        device = SimpleNamespace(platform=platform)
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
    Workers(handles, None, lambda: None, 1.0, asked).connect()
    assert {type(handle.worker._transport) for handle in handles} == {used}
    word = "pull" if used is PullTransport else "collective"
    line = f"arrays go between processes by cluster.transport={word}"
    assert caplog.messages == [line] * 2


def test_one_alone_needs_no_way(handles):
    Workers(handles[:1], None, lambda: None, 1.0).connect()
    assert handles[0].worker._transport is None


KNOWN = {
    *(f"runtime/{name}.py" for name in ("pull", "permute", "transfer", "compile", "choices")),
    "runtime/shared_sum.py",
    "base/jax_compat.py",
    "cluster/process_group.py",  # `Peer._rank`, where there are no servers
    "api/own_copies.py",  # which devices are this process's, as its own JAX says
    # Under servers the first worker alone writes, as the only process that it knows.
    *("train/worker.py", "checkpoint/trees.py", "checkpoint/orbax_compat.py"),
}


def test_jax_s_number_of_a_process_is_no_worker_s_name():
    """Under parameter servers each worker is process 0 of its own JAX: its name is `Peer._rank`."""
    root = Path(launcher.__file__).parent
    using = {
        f"{path.relative_to(root).parts[0]}/{path.name}"  # the room and the module
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.process_index"
    }
    assert using == KNOWN
