"""Whose a mirror is: the run's that used it first, on any disk; before anything starts."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fault_proxy import Fault, FaultProxy
from object_servers import s3_server

from launcher.base.object_store import Store
from launcher.checkpoint import Mirror, newest, note_roll_back, steps_in
from launcher.checkpoint.layout import METADATA, checksums, files_below, write_checksums
from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.folder.folder import RunFolder, claim
from launcher.driver.folder.mirrored import (
    _wait,
    bring_back,
    fetch_older,
    go_back,
    look_at_mirror,
    own,
)
from launcher.report.console import make_console
from launcher.stop import Stop

URL = "s3://bucket/runs/a"


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultProxy]:
    monkeypatch.chdir(tmp_path)
    with s3_server() as server, FaultProxy(server.url) as proxy:
        for name, value in {**server.environ(proxy.url), "NO_PROXY": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        yield proxy


def config_of(*words: str) -> Config:
    return load(["model=mlp", "dataset=synthetic", "run.id=a", f"run.mirror={URL}", *words])


def start(config: Config) -> Path:
    """Begin a run, up to its claims; return its folder."""
    bring_back(config, make_console())
    with claim(config) as home:
        own(config, home)
        return home.path


def save(home: Path, step: int) -> None:
    root = home / "checkpoints" / str(step)
    root.mkdir(parents=True)
    (root / METADATA).write_text('{"custom_metadata": {}}')
    write_checksums(root, step, checksums(root, files_below(root)))


def test_a_mirror_belongs_to_one_run(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    home = start(config_of())
    assert (home / "mirror.json").stat().st_mode & 0o777 == 0o600
    start(config_of())  # the same run, also after SIGKILL
    shutil.rmtree(home)
    start(config_of())  # … or on another disk, before it has saved
    shutil.rmtree(home)
    start(config_of("run.resume=never"))  # there is nothing to resume from
    save(home, 3)
    Mirror(Store(URL)).upload(home, 3, 2, lambda done, size: None)
    for words, text in (
        (("run.id=b",), "belongs to run a"),
        (("run.dir=other", "run.resume=never"), "holds a run a already"),
    ):
        with pytest.raises(ConfigError, match=text):
            start(config_of(*words))
        assert not Path("other").exists()
        assert not Path("outputs/b").exists()
    with pytest.raises(ConfigError, match="finds nothing to resume from"):
        start(config_of("run.dir=other", "run.mirror=s3://bucket/none", "run.resume=must"))
    with pytest.raises(ConfigError, match="s3://absent/a/owner is not there"):
        look_at_mirror(config_of("run.mirror=s3://absent/a"))
    save(Path("grown/a"), 3)
    with pytest.raises(ConfigError, match="belongs to another run a than grown/a"):
        look_at_mirror(config_of("run.dir=grown"))
    shutil.rmtree(home / "checkpoints")
    # Out of reach: only a run that has a checkpoint here, and knows its mirror, may begin.
    monkeypatch.setattr("launcher.driver.folder.mirrored._PATIENCE", 0.1)
    proxy.fail(Fault("status", times=9999))
    with pytest.raises(OSError, match="is not available"):
        look_at_mirror(config_of())
    save(home, 3)
    assert look_at_mirror(config_of()) is None


def test_without_the_library_the_error_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.base.libraries.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs boto3\. Install it: pip install 'boto3>=") as no:
        look_at_mirror(config_of())
    assert no.value.code == "missing_package"


def test_without_an_intact_copy_nothing_begins_anew(proxy: FaultProxy) -> None:
    home, mirror = start(config_of()), Mirror(Store(URL))
    save(home, 3)
    mirror.upload(home, 3, 2, lambda done, size: None)
    mirror.store.put(f"copies/1/1/checkpoints/3/{METADATA}", b"garbage")
    shutil.rmtree(home)
    with pytest.raises(ConfigError, match=r"nothing in .* is intact"):
        start(config_of())
    assert not home.exists()
    mirror.store.put("commits/1", b"garbage")
    with pytest.raises(ConfigError, match="damaged"):
        start(config_of())
    assert steps_in(home / "checkpoints") == []


def test_where_none_here_is_intact_the_error_says_how_to_fetch_one(proxy: FaultProxy) -> None:
    home = start(config_of())
    save(home, 3)
    Mirror(Store(URL)).upload(home, 3, 2, lambda done, size: None)
    (home / "checkpoints/3" / METADATA).write_bytes(b"garbage")
    with pytest.raises(ConfigError) as raised:
        start(config_of())
    assert raised.value.remedy.endswith(f"of {URL}, if it has any, remove them all.")
    shutil.rmtree(home / "checkpoints/3")
    note_roll_back(home, 1)
    bring_back(config_of(), make_console())
    assert newest(home / "checkpoints").step == 3
    assert not (home / "rolled_back.json").exists()


def test_an_older_checkpoint_comes_from_the_own_mirror_if_none_here_is_intact(
    proxy: FaultProxy,
) -> None:
    config, mirror = config_of(), Mirror(Store(URL))
    home = RunFolder(start(config))

    def fetch(step: int) -> str:
        return fetch_older(config, home, step, make_console())

    go_back(config, home, 1)  # before anything is saved
    for step in (2, 4, 6):
        save(home.path, step)
        mirror.upload(home.path, step, 3, lambda done, size: None)
    whole = (home.checkpoints / "2" / METADATA).read_bytes()
    (home.checkpoints / "2" / METADATA).write_bytes(b"garbage")
    shutil.rmtree(home.checkpoints / "4")
    (home.path / "metrics.jsonl").write_text("of this start")
    assert fetch(6) == ""
    assert steps_in(home.checkpoints) == [2, 6]
    assert "no checkpoint of a step up to 1" in fetch(1)
    assert fetch(3) == ""
    assert (home.checkpoints / "2" / METADATA).read_bytes() == whole
    assert (home.path / "metrics.jsonl").read_text() == "of this start"
    shutil.rmtree(home.checkpoints / "2")
    mirror.store.put("owner", b"b/1234")
    assert "no checkpoint of a step up to 5" in fetch(5)


def test_a_run_that_waits_for_its_mirror_says_so() -> None:
    console, phases = make_console(io.StringIO()), []
    console.phases = (lambda phase, *done: phases.append(phase),)
    ends = iter((False, False, True))
    process = SimpleNamespace(
        finish=lambda: None, wait=lambda seconds: next(ends), progress=(1 << 20, 2 << 20)
    )
    _wait(process, URL, console, Stop())
    assert phases[0] == "mirroring"
