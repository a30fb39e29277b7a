"""Checkpoints in an object store: real servers, behind a proxy that fails as networks do."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_proxy import Fault, FaultProxy
from object_servers import SECRET, ObjectServer, object_server

from launcher.base import object_store
from launcher.base.object_store import Store, StoreError, UnavailableError
from launcher.checkpoint import damage, steps_in
from launcher.checkpoint.layout import METADATA, checksums, files_below, write_checksums
from launcher.checkpoint.mirror import Mirror, SupersededError, note_roll_back, unmirrored
from launcher.checkpoint.mirroring import _PROGRAM, Mirroring

OWNER = "run/1234"


@pytest.fixture(scope="module", params=["s3", pytest.param("gs", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Iterator[ObjectServer]:
    with object_server(request.param) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(server: ObjectServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def url(
    server: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    """An empty prefix of the server behind the proxy, with credentials in the environment."""
    for name, value in {**server.environ(proxy.url), "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "_FIRST_WAIT", 0.02)
    proxy.heal()
    return f"{server.bucket}/{tmp_path.name}-{os.getpid()}/{random.randrange(2**32)}"


def save(home: Path, step: int, every_steps: int = 0, size: int = 4000) -> Path:
    """Write a checkpoint, as small as can be, and the metrics up to it."""
    root = home / "checkpoints" / str(step)
    partial = root.with_name(f"{step}.partial-x")
    content = random.Random(f"{step} {time.time()}")
    for name in ("default/d/a", "default/d/b", "default/ocdbt.process_0/c"):
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_bytes(content.randbytes(size))
    config = {"train": {"checkpoint": {"every_steps": every_steps}}}
    (partial / METADATA).write_text(json.dumps({"custom_metadata": {"config": config}}))
    write_checksums(partial, step, checksums(partial, files_below(partial)))
    if root.exists():
        shutil.rmtree(root)
    partial.rename(root)
    with open(home / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": {step}}}\n')
    return root


def content_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in files_below(root)}


def quiet(done: int, size: int) -> None:
    """Take the progress of a copy."""


def mirror_of(url: str, patience: float = 20.0) -> Mirror:
    return Mirror(Store(url, patience))


def fetched(url: str, home: Path) -> tuple[int, list[str]]:
    """Fetch the newest intact checkpoint; return its step, and what was wrong with newer ones."""
    mirror, problems = mirror_of(url), []
    for copy in mirror.copies():
        if (problem := mirror.fetch(copy, home, quiet)) is None:
            return copy.step, problems
        assert not (home / "checkpoints" / str(copy.step)).exists()
        problems.append(problem)
    return 0, problems


def test_what_was_uploaded_comes_back(url: str, proxy: FaultProxy, tmp_path: Path) -> None:
    home, empty, mirror = tmp_path / "home", tmp_path / "empty", mirror_of(url)
    (home / "autotune/worker_0").mkdir(parents=True)
    (home / "autotune/worker_0/kernel").write_bytes(b"chosen")
    (home / "config.yaml").write_text("run: {id: run}")
    assert mirror.copies() == ()
    for step in (1, 2, 3):
        save(home, step)
        assert unmirrored(home, mirror.copies()) == [step]
        mirror.upload(home, step, 2, quiet)
        assert unmirrored(home, mirror.copies()) == []
    before = len(proxy.seen())
    assert [copy.step for copy in mirror_of(url).copies()] == [3, 2]
    assert fetched(url, empty) == (3, [])
    assert content_of(empty / "checkpoints/3") == content_of(home / "checkpoints/3")
    for name in ("metrics.jsonl", "config.yaml", "autotune/worker_0/kernel"):
        assert (empty / name).read_bytes() == (home / name).read_bytes()
    assert [path.name for path in (empty / "checkpoints").iterdir()] == ["3"]
    # No LIST decides anything.
    assert not [seen for seen in proxy.seen()[before:] if "prefix=" in seen]


def test_large_files_go_in_parts(
    url: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PART", 5 << 20)
    save(tmp_path, 1, size=12 << 20)
    proxy.fail(Fault("status", "partNumber=2|PUT /upload", retry_after=0))
    sent: list[tuple[int, int]] = []
    mirror_of(url).upload(tmp_path, 1, 2, lambda *done: sent.append(done))
    assert sent[-1][0] == sent[-1][1] > 3 * (12 << 20)
    proxy.fail(Fault("truncate", "default", after=1000))
    assert fetched(url, tmp_path / "empty") == (1, [])
    found = content_of(tmp_path / "empty/checkpoints/1")
    assert found == content_of(tmp_path / "checkpoints/1")


def test_keep_holds_for_the_mirror(url: str, proxy: FaultProxy, tmp_path: Path) -> None:
    mirror = mirror_of(url)
    for step in (10, 12, 20, 22, 24):  # those of every_steps=10 stay
        save(tmp_path, step, every_steps=10)
        mirror.upload(tmp_path, step, 1, quiet)
    assert [copy.step for copy in mirror.copies()] == [24, 20, 10]
    assert_no_rest(url)
    # An older one that lacks its copy is not made the newest.
    assert unmirrored(tmp_path, mirror.copies()[:1]) == []
    # After a roll-back, what it has gone back on is no part of the run any more.
    for step in (12, 22, 24):
        shutil.rmtree(tmp_path / f"checkpoints/{step}")
    assert unmirrored(tmp_path, mirror.copies()) == []  # they may be lost or damaged here alone
    for back in (20, 21):
        note_roll_back(tmp_path, back)
    assert unmirrored(tmp_path, mirror.copies()) == [20]
    mirror.upload(tmp_path, 20, 1, quiet)
    assert [copy.step for copy in mirror.copies()] == [20, 10]
    assert unmirrored(tmp_path, mirror.copies()) == []
    for step in (21, 23):
        save(tmp_path, step)
        mirror.upload(tmp_path, step, 2, quiet)
    shutil.rmtree(tmp_path / "checkpoints/23")
    save(tmp_path, 21)
    save(tmp_path, 25)
    note_roll_back(tmp_path, 20)  # … and the store was away until now
    mirror.upload(tmp_path, 25, 2, quiet)
    assert [copy.step for copy in mirror.copies()] == [25, 20, 10]
    shutil.rmtree(tmp_path / "checkpoints/25")
    shutil.rmtree(tmp_path / "checkpoints/21")
    note_roll_back(tmp_path, 20)
    put, mirror.store.put = (
        mirror.store.put,
        lambda *what: note_roll_back(tmp_path, 20) or put(*what),
    )
    mirror.upload(tmp_path, 20, 1, quiet)  # meanwhile it goes back once more
    mirror.store.put = put
    assert (tmp_path / "rolled_back.json").exists()
    save(tmp_path, 21, every_steps=10)
    mirror.upload(tmp_path, 21, 1, quiet)
    assert [copy.step for copy in mirror.copies()] == [21, 20, 10]
    # Saved again: the newer one counts.
    save(tmp_path, 21, every_steps=10)
    assert unmirrored(tmp_path, mirror.copies()) == [21]
    mirror.upload(tmp_path, 21, 1, quiet)
    assert fetched(url, tmp_path / "empty") == (21, [])
    found = content_of(tmp_path / "empty/checkpoints/21")
    assert found == content_of(tmp_path / "checkpoints/21")
    # One that lost its checksums is no reason to copy nothing more.
    (tmp_path / "checkpoints/10/checksums.json").unlink()
    save(tmp_path, 22)
    assert unmirrored(tmp_path, mirror.copies()) == [22]


@pytest.mark.slow
def test_of_damaged_objects_the_next_older_is_taken(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror, array = mirror_of(url), "copies/3/1/checkpoints/3/default/d/b"
    for step in (1, 2, 3):
        save(tmp_path, step)
        mirror.upload(tmp_path, step, 3, quiet)
    store = mirror.store
    flipped = store.get(array)[:7] + bytes([store.get(array)[7] ^ 1]) + store.get(array)[8:]
    damages = {
        array: (None, flipped, store.get(array)[:-1]),
        "commits/3": (None, b"garbage", store.get("commits/2")),
        "copies/3/1/checkpoints/3/checksums.json": (None, b"garbage"),
        "copies/3/1/metrics.jsonl": (None, b"garbage"),
    }
    for name, contents in damages.items():
        before = store.get(name)
        for number, content in enumerate(contents):
            store.delete(name) if content is None else store.put(name, content)
            empty = tmp_path / f"empty-{name.replace('/', '-')}-{number}"
            step, problems = fetched(url, empty)
            store.put(name, before)
            is_unseen = (name, content) == ("commits/3", None)
            assert (step, len([*problems, *caplog.messages])) == (2, 1 - is_unseen), name
            caplog.clear()
            found = content_of(empty / f"checkpoints/{step}")
            assert found == content_of(tmp_path / f"checkpoints/{step}")


def test_only_an_answer_that_was_cut_is_asked_for_again() -> None:
    pytest.importorskip("google.cloud.storage")
    for answer, kind in ((b"", UnavailableError), (None, type(None))):
        with pytest.raises(AttributeError) as raised:
            answer.get("size")
        assert type(object_store._Google.explain(raised.value, "gs://bucket/a")) is kind


def test_a_prefix_has_one_owner_and_mirrors_its_newest_start(url: str, tmp_path: Path) -> None:
    first, second = mirror_of(url), mirror_of(url)
    assert first.owner() is None
    assert first.own(OWNER)
    assert second.own(OWNER)
    assert not second.own("run/5678")
    assert second.owner() == OWNER
    homes = [tmp_path / name for name in "ab"]
    for home in homes:
        save(home, 1)
    first.upload(homes[0], 1, 2, quiet)
    before = first._newest()
    second.upload(homes[1], 1, 2, quiet)
    with pytest.raises(SupersededError, match="on another disk"):
        first.upload(homes[0], 1, 2, quiet)
    # The first one's upload was under way when the second one began, and ended before it.
    save(homes[1], 2)
    second._newest = lambda: before
    with pytest.raises(StoreError, match="until now"):
        second.upload(homes[1], 2, 2, quiet)
    del second._newest
    second.upload(homes[1], 2, 2, quiet)
    assert [(copy.number, copy.step) for copy in second.copies()] == [(3, 2), (2, 1)]


def test_two_starts_that_copy_at_once_do_not_mix(url: str, tmp_path: Path) -> None:
    """The second begins and copies while the first one's files are under way, or all there."""
    homes = [tmp_path / name for name in "ab"]
    for home in homes:
        save(home, 1)
    for is_late in (False, True):
        place, empty = f"{url}/{is_late}", tmp_path / f"empty{is_late}"
        first, second = mirror_of(place), mirror_of(place)
        name = "put" if is_late else "put_file"
        setattr(first.store, name, overtaken(getattr(first.store, name), second, homes[1]))
        with pytest.raises(SupersededError):
            first.upload(homes[0], 1, 1, quiet)
        assert (first.start, second.start) == (1, 2)
        assert_no_rest(place)
        assert fetched(place, empty) == (1, [])
        assert content_of(empty / "checkpoints/1") == content_of(homes[1] / "checkpoints/1")
        save(homes[1], 2)
        second.upload(homes[1], 2, 1, quiet)
        assert_no_rest(place)
        shutil.rmtree(homes[1] / "checkpoints/2")


def overtaken(send, other: Mirror, home: Path):
    """What sends an object, and before the first one has another mirror copy all."""
    turns = iter([other])

    def first_the_other(*what):
        for other in turns:
            other.upload(home, 1, 1, quiet)
        return send(*what)

    return first_the_other


def test_settings_are_uploaded_without_secrets_and_stay_where_they_are(
    url: str, tmp_path: Path
) -> None:
    home, empty = tmp_path / "home", tmp_path / "empty"
    save(home, 1)
    (home / "config.yaml").write_text("secret")
    Mirror(Store(url), texts={"config.yaml": "***", "absent": ""}).upload(home, 1, 2, quiet)
    assert not [name for name, _ in Store(url).objects() if name.endswith("absent")]
    assert fetched(url, empty) == (1, [])
    assert (empty / "config.yaml").read_text() == "***"
    (empty / "config.yaml").write_text("of this start")
    shutil.rmtree(empty / "checkpoints")
    assert fetched(url, empty) == (1, [])
    assert (empty / "config.yaml").read_text() == "of this start"


KINDS = ("status", "lost", "reset", "reset_upload", "truncate", "flip", "shorten", "hide")
OBJECTS = ("", "checkpoints", "checksums", "commits", "copies", "prefix=", "metrics", "owner")


def faults(chance: random.Random) -> list[Fault]:
    """Some faults: for any request, or for requests for some objects."""
    return [
        Fault(
            kind := chance.choice(KINDS),
            matches=chance.choice(OBJECTS),
            times=chance.choice((1, 1, 2, 3)),
            status=chance.choice((429, 500, 503)),
            retry_after=chance.choice((None, 0, 1 if kind == "status" else 0)),
            after=chance.choice((0, 1, 50, 900)),
        )
        for _ in range(chance.randint(1, 4))
    ]


def check_faults(url: str, proxy: FaultProxy, home: Path, seed: int) -> None:
    """Upload and fetch through faults: never wrong bytes, nothing lost that was committed."""
    chance, committed, shown = random.Random(seed), 0, []
    for step in range(1, 4):
        save(home, step)
        proxy.heal()
        proxy.fail(*faults(chance))
        try:
            mirror_of(url, chance.choice((0.1, 5.0))).upload(home, step, 2, quiet)
            committed = step
        except StoreError as error:
            shown.append(str(error))
    proxy.heal()
    proxy.fail(*faults(chance))
    empty = home / "empty"
    try:
        step, _ = fetched(url, empty)
    except StoreError:
        assert not [*empty.glob("checkpoints/*")]
        proxy.heal()
        step, _ = fetched(url, empty)
    assert step >= committed - 1  # damaged on its way twice: the next older
    for found in steps_in(empty / "checkpoints"):
        assert content_of(empty / f"checkpoints/{found}") == content_of(
            home / f"checkpoints/{found}"
        )
    assert SECRET not in "".join(shown)
    proxy.heal()
    shutil.rmtree(empty, ignore_errors=True)
    assert fetched(url, empty)[0] >= committed
    for step in (1, 2, 3):
        assert damage(home / f"checkpoints/{step}") is None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(3))
def test_faults(url: str, proxy: FaultProxy, tmp_path: Path, seed: int) -> None:
    check_faults(url, proxy, tmp_path, seed)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(100, 150))
def test_many_faults(url: str, proxy: FaultProxy, tmp_path: Path, seed: int) -> None:
    check_faults(url, proxy, tmp_path, seed)


def start(url: str, home: Path) -> subprocess.Popen:
    """Start the process that mirrors, as a run does."""
    about = {"url": url, "home": str(home), "owner": OWNER, "keep": 2, "texts": {}}
    command, pipe = [sys.executable, "-c", _PROGRAM], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    with process.stdin:
        json.dump(about, process.stdin)
    process.stdin = None
    return process


@pytest.mark.slow
@pytest.mark.sampled(2)
def test_killed_at_any_moment_nothing_half_counts(
    url: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    home, chance, saved, found = tmp_path / "home", random.Random(7), {}, []
    killed = 0
    for step in range(1, 17):
        root = save(home, step, every_steps=5, size=20_000)
        saved[step] = content_of(root)
        if step > 2 and (step - 2) % 5:
            shutil.rmtree(home / f"checkpoints/{step - 2}")
        last = len(proxy.seen()) + chance.randrange(1, 60)
        process = start(url, home)
        while len(proxy.seen()) < last and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        process.stdout.close()
        process.stderr.close()
        empty = tmp_path / f"empty{step}"
        newest, problems = fetched(url, empty)
        assert problems == []
        found.append(newest)
        if newest:
            assert content_of(empty / f"checkpoints/{newest}") == saved[newest]
    process = start(url, home)
    out, _ = process.communicate()
    assert json.loads(out.splitlines()[-1]) == {"mirrored": 16}
    assert found == sorted(found)
    assert killed >= 8
    assert len(set(found)) > 3  # and some of them came through
    newest, *others = [copy.step for copy in mirror_of(url).copies()]
    assert newest == 16
    assert {15, 10, 5} < set(others)  # these stay, and one more is kept
    assert len(others) == 4
    assert fetched(url, tmp_path / "last") == (16, [])
    # What was left by killed uploads and deletions is gone: what is there belongs to a commit.
    assert_no_rest(url)


def assert_no_rest(url: str) -> None:
    """Fail if the store holds objects that no copy needs."""
    store = mirror_of(url).store
    needed = {f"commits/{n}" for n in range(1, mirror_of(url)._newest()[0] + 1)}
    for copy in mirror_of(url).copies():
        root = copy.root
        sums = f"{root}/checkpoints/{copy.step}/checksums.json"
        files = json.loads(store.get(sums))["files"]
        needed |= {sums, *(f"{root}/{name}" for name in copy.files)}
        needed |= {f"{root}/checkpoints/{copy.step}/{name}" for name in files}
    left = {name for name, _ in store.objects() if not name.startswith("starts/")}
    assert left - {"owner"} == needed


def until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.sampled(2)
def test_the_process_tells_retries_and_is_replaced(
    url: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    save(tmp_path, 1)
    monkeypatch.setattr("launcher.checkpoint.mirroring._LOOK_SECONDS", 0.05)
    proxy.fail(Fault("delay", "PUT|POST", seconds=0.5))
    texts = {"config.yaml": "#" * 2**18}  # more than an argument may have
    process = Mirroring(url, tmp_path, OWNER, 2, texts, lines.append)
    until(lambda: process._process is not None)
    until(lambda: os.getpriority(os.PRIO_PROCESS, process._process.pid) == 19)
    until(lambda: os.sched_getscheduler(process._process.pid) == os.SCHED_IDLE)
    group = Path(f"/proc/{process._process.pid}/autogroup")  # where the kernel has such
    until(lambda: not group.exists() or group.read_text().endswith(" nice 19\n"))
    until(lambda: process.mirrored == 1)
    proxy.fail(Fault("status", status=401, times=9999))
    save(tmp_path, 2)
    until(lambda: lines)
    assert "credentials" in lines[0]
    assert lines[0].startswith("step 2 is not mirrored: ")
    assert steps_in(tmp_path / "checkpoints") == [1, 2]
    proxy.heal()
    save(tmp_path, 3)  # the next save tries again
    until(lambda: process.mirrored == 3)
    assert lines[1:] == [f"step 3 is mirrored to {url} again"]
    proxy.fail(Fault("delay", "PUT|POST", times=9999, seconds=60.0))
    before = len(proxy.seen())
    save(tmp_path, 4)
    until(lambda: any(seen[0] == "P" for seen in proxy.seen()[before:]))
    process._process.kill()
    until(lambda: len(lines) == 3)
    assert "process for it ended (-9)" in lines[2]
    proxy.heal()
    process.finish()  # the end tries again, too
    assert process.wait(60)
    assert process.mirrored == 4
    assert fetched(url, tmp_path / "empty") == (4, [])
    assert [name for name, _ in mirror_of(url).store.objects("starts/")] == ["starts/1"]
    # A disk that lacks what was trained on another one takes nothing away.
    save(tmp_path / "old", 1)
    stale = Mirroring(url, tmp_path / "old", OWNER, 2, {}, lines.append)
    until(lambda: "it has step 4, later than this disk" in lines[-1])
    stale.kill()
    assert fetched(url, tmp_path / "second") == (4, [])
    # Another run has taken the prefix over: this one ends, and says so.
    other = Mirroring(url, tmp_path, "run/other", 2, {}, lines.append)
    assert other.wait(60)
    assert other.mirrored == 0
    assert "belongs to another run" in lines[-1]
    written = "".join(path.read_text(errors="replace") for path in files_below(tmp_path))
    assert SECRET not in written + "".join(lines)
