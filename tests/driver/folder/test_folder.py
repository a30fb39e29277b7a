"""Whose folder is it: every rule of `run.id` and `run.resume`, and its words."""

import fcntl
import functools
import json
import os
import re
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from launcher import checkpoint
from launcher.checkpoint.train_state import TrainState
from launcher.config.cluster import Slurm, SlurmCluster
from launcher.config.compose import load, redacted, to_dict
from launcher.config.errors import ConfigError
from launcher.driver.folder import folder
from launcher.driver.folder.make_folder import new_id


@functools.cache
def composed():
    return load(["model=mlp", "dataset=synthetic"])


@pytest.fixture
def config(tmp_path):
    return replace(composed(), run=replace(composed().run, dir=f"{tmp_path}/outputs"))


def named(config, run_id="mine", **fields):
    return replace(config, run=replace(config.run, id=run_id, **fields))


def positions(step):
    return {"data": {"next_batch": step}, "metrics": {"next_step": step + 1}}


def save_checkpoint(config, step, told=lambda config: {"config": to_dict(config)}):
    path = Path(config.run.dir, config.run.id, "checkpoints")
    state = TrainState(jnp.int32(step), {"w": jnp.ones(2)}, (), jnp.zeros(2, jnp.uint32))
    checkpoint.save(path, step, checkpoint.copy_to_host(state), {**positions(step), **told(config)})


def refuses(config, match):
    """Whether both the check and the claim of a folder refuse it."""
    for door in (folder.check, lambda config: folder.claim(config).__enter__()):
        with pytest.raises(ConfigError, match=match):
            door(config)
    return True


def test_a_fresh_id_says_model_and_time_and_is_drawn_anew():
    ids = {new_id("gpt") for _ in range(3)}
    assert len(ids) == 3
    assert all(re.fullmatch(r"gpt-\d{8}-\d{6}-[0-9a-f]{4}", run_id) for run_id in ids)


def test_checking_leaves_nothing_behind(config):
    assert folder.check(config) == 0
    assert folder.check(named(config)) == 0
    assert not Path(config.run.dir).exists()


def test_unnamed_runs_never_share_a_folder(config):
    with folder.claim(config) as one, folder.claim(config) as other:
        assert one.path != other.path
        assert one.path.parent == other.path.parent == Path(config.run.dir)
        assert one.finished_steps == 0


def test_a_taken_id_is_refused_where_nothing_may_be_resumed(config):
    config = named(config, resume="never")
    with folder.claim(config):
        pass
    text = (
        f"run.id=mine is taken: {config.run.dir}/mine exists, and run.resume=never. "
        "Choose another run.id, or use run.resume=auto to resume that run."
    )
    assert refuses(config, f"^{re.escape(text)}$")


def test_what_must_be_resumed_must_be_there(config):
    config = named(config, resume="must")
    with pytest.raises(ConfigError) as error:
        folder.check(config)
    assert str(error.value) == (
        f"run.resume=must finds nothing to resume from: {config.run.dir}/mine/checkpoints holds no "
        "checkpoint. Check run.id and run.dir, or use run.resume=auto."
    )


def test_a_run_without_a_checkpoint_starts_afresh_in_its_own_folder(config):
    config = named(config)
    with folder.claim(config) as first:
        pass
    with folder.claim(config) as again:
        assert (again.path, again.finished_steps) == (first.path, 0)


def test_what_a_killed_start_left_half_written_goes(config):
    """A batch script may hold secrets."""
    with folder.claim(config) as home:
        left = home.path / "job.sbatch.0123abcd.partial"
        left.touch()
        os.utime(left, (0, 0))
    config = replace(config, run=replace(config.run, id=home.id))
    with folder.claim(config):
        assert not left.exists()


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_run_goes_on_from_its_newest_checkpoint(config, resume):
    config = named(config, resume=resume)
    save_checkpoint(config, 3)
    save_checkpoint(config, 12)
    assert folder.check(config) == 12
    with folder.claim(config) as home:
        assert (home.id, home.finished_steps) == ("mine", 12)


@pytest.mark.parametrize(
    ("section", "field", "value", "text"),
    [
        ("model", "hidden_size", 96, "model.hidden_size=96"),
        ("dataset", "num_samples", 7, "dataset.num_samples=7"),
        ("optimizer", "b2", 0.5, "optimizer.b2=0.5"),
        ("train", "global_batch_size", 64, "train.global_batch_size=64"),
        ("train", "precision", "bf16", "train.precision='bf16'"),
        ("run", "seed", 1, "run.seed=1"),
    ],
)
def test_a_run_does_not_go_on_as_another_one(config, section, field, value, text):
    config = named(config)
    save_checkpoint(config, 5)
    before = getattr(getattr(config, section), field)
    other = replace(config, **{section: replace(getattr(config, section), **{field: value})})
    with pytest.raises(ConfigError) as error:
        folder.check(other)
    assert str(error.value) == (
        f"{text} does not fit run.id=mine, which reached step 5 with {section}.{field}={before!r}. "
        "Set it back to resume that run, or choose another run.id."
    )


def test_a_run_may_go_on_longer_elsewhere_and_otherwise_cut(config):
    config = named(config)
    save_checkpoint(config, 5)
    other = replace(
        config,
        train=replace(config.train, steps=999, log_every=5),
        parallel=replace(config.parallel, num_stages=1, num_micro_batches=2),
        cluster=replace(config.cluster, gpus=1),
    )
    assert folder.check(other) == 5


def test_a_folder_is_where_it_was_whatever_the_working_directory(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = named(replace(config, run=replace(config.run, dir="outputs")))
    with folder.claim(config) as home:
        monkeypatch.chdir("/")
        home.check()
        with monkeypatch.context() as at_home:
            at_home.chdir(tmp_path)
            home.path.rename("elsewhere")
            with pytest.raises(folder.LostFolderError, match=r"renamed to .*elsewhere"):
                home.check()
            Path("elsewhere").rename(home.path)


NO_LOCKS = """
import errno, fcntl
def refuse(file, operation):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = refuse
"""


@pytest.mark.parametrize("has_locks", [True, False])
def test_two_runs_at_once_cannot_hold_one_folder(config, has_locks, monkeypatch):
    config, before = named(config), "" if has_locks else NO_LOCKS
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)
    exec(before, {})
    program = before + (
        "import sys; from launcher.config.compose import load\n"
        "from launcher.driver.folder import folder\n"
        "with folder.claim(load(sys.argv[1:])):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    words = ["model=mlp", "dataset=synthetic", f"run.dir={config.run.dir}", "run.id=mine"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError) as error, folder.claim(config):
            pass
        home = f"{config.run.dir}/mine"
        assert str(error.value) == (
            f"run.id=mine is running right now, in {home}. "
            "Wait for it to end, or choose another run.id."
            + ("" if has_locks else f" If its process is gone, delete {home}/.held.")
        )
        other.kill()  # the hardest of ends lets go of the folder too
    with folder.claim(config) as home:
        assert home.id == "mine"
    assert not (home.path / ".held").exists()


def test_a_run_goes_on_with_other_secrets_which_its_checkpoints_do_not_hold(config):
    config = named(config)
    cluster = SlurmCluster(slurm=Slurm(env={"WANDB_API_KEY": "a secret"}))
    config = replace(config, cluster=cluster)
    assert redacted(config)["cluster"]["slurm"]["env"] == {"WANDB_API_KEY": "***"}
    save_checkpoint(config, 5, lambda config: {"config": redacted(config)})
    assert folder.check(config) == 5


def test_a_checkpoint_that_cannot_be_listed_is_a_damaged_one(config, tmp_path):
    config = named(config)
    save_checkpoint(config, 5)
    save_checkpoint(config, 6)
    closed = Path(config.run.dir, "mine", "checkpoints", "6")
    closed.chmod(0)
    try:
        if os.access(closed, os.R_OK):
            pytest.skip("this user may read everything")
        with folder.claim(config) as home:
            assert home.finished_steps == 5
        (line,) = home.damaged
        assert "6 is damaged and not used: checksums.json cannot be read (Permission" in line
    finally:
        for path in (closed, closed.with_name("6.damaged")):
            if path.exists():
                path.chmod(0o700)


@pytest.mark.parametrize("run_id", [None, "mine"])
def test_a_folder_that_cannot_be_made_is_refused_with_a_remedy(config, tmp_path, run_id):
    with pytest.raises(ConfigError, match=r"^run\.dir=a+ cannot hold a run: .*name too long"):
        folder.check(named(config, run_id, dir="a" * 300))
    with pytest.raises(ConfigError, match=r"run\.dir=/proc/x cannot hold a run: you may not write"):
        folder.check(named(config, dir="/proc/x"))  # where root has every permission
    folder.check(config)
    assert not any(tmp_path.iterdir())
    (tmp_path / "outputs").write_text("a file, not a folder")
    told = r"run\.dir=.*/outputs cannot hold a run: .*Set run\.dir to a folder that you can write"
    assert refuses(named(config, run_id), told)


def test_a_run_whose_name_is_a_files_is_refused(config):
    Path(config.run.dir).mkdir()
    Path(config.run.dir, "mine").write_text("a file, not a folder")
    told = "run.id=mine cannot have a folder: .*/outputs/mine is a file"
    assert refuses(named(config, "mine"), told)


def test_another_value_of_a_variable_is_another_run(config, monkeypatch):
    """The checkpoint holds what asks for it, and enough to notice; not the value."""
    monkeypatch.setenv("HIDDEN", "4711")
    words = ["model=mlp", "dataset=synthetic", f"run.dir={config.run.dir}", "run.id=mine"]
    asked = "model.hidden_size=${oc.env:HIDDEN}"
    config = load([*words, asked])
    plan = SimpleNamespace(to_dict=dict)
    save_checkpoint(config, 5, lambda config: folder.contents(config, plan.to_dict(), 5))
    assert "4711" not in json.dumps(checkpoint.read_metadata(folder_of(config), 5))
    assert folder.check(config) == 5
    assert folder.check(load([*words, "model.hidden_size=4711"])) == 5
    monkeypatch.setenv("HIDDEN", "4712")
    for word in (asked, "model.hidden_size=4712"):
        with pytest.raises(ConfigError) as error:
            folder.check(load([*words, word]))
        assert str(error.value).startswith(
            "model.hidden_size=4712 does not fit run.id=mine, which reached step 5 with "
            "model.hidden_size='${oc.env:HIDDEN}'. "
        )


def folder_of(config):
    return Path(config.run.dir, config.run.id, "checkpoints")


def modes(path):
    return {p.name: stat.S_IMODE(p.stat().st_mode) for p in (path, *path.rglob("*"))}


@pytest.mark.parametrize("run_id", ["mine", None])
def test_a_run_is_its_users_alone_unless_it_is_shared(config, run_id):
    for shared, folders, files in ((False, 0o700, 0o600), (True, 0o750, 0o640)):
        before = os.umask(0o027)
        try:
            run = named(config, run_id and f"{run_id}-{shared}", shared=shared)
            with folder.claim(run) as home:
                (home.path / "below").mkdir()
                (home.path / "below" / "file").touch()
            assert os.umask(0o027) == 0o027
        finally:
            os.umask(before)
        found = modes(home.path)
        assert found.pop(".lock") == found.pop("file") == files
        assert set(found.values()) == {folders}


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o2775, 0o755])
def test_a_private_job_is_where_nobody_can_replace_it(config, mode):
    """Slurm would run somebody's script as this user; a run by itself takes no code from there."""
    config, above = named(config), Path(config.run.dir)
    above.mkdir()
    above.chmod(mode)
    assert folder.check(config) == 0
    config = replace(config, task="submit")
    told = r"^run\.dir=.* anybody may rename .* run: chmod o-w "
    assert mode != 0o777 or refuses(config, told)
    shared = named(config, shared=mode == 0o777)
    assert folder.check(shared) == 0
    with folder.claim(shared):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_a_private_run_is_in_a_folder_of_its_users(config):
    config, path = named(config), Path(config.run.dir, "mine")
    path.mkdir(parents=True)
    path.chmod(0o700)
    os.chown(path, 65534, -1)
    assert refuses(config, r"run\.id=mine cannot be private: .* another user")
    with folder.claim(named(config, shared=True)):
        pass
    os.chown(path.parent, 65534, -1)  # what is not open to everybody was somebody's choice
    with folder.claim(named(config, "other")):
        pass
    path.parent.chmod(0o1777)  # whose owner can rename everything, sticky or not
    with pytest.raises(ConfigError, match="anybody may rename"):
        folder.check(replace(named(config, "other"), task="submit"))


def test_an_open_folder_is_closed_and_anothers_refused(config, monkeypatch):
    path = Path(config.run.dir, "mine")
    path.mkdir(parents=True)
    path.chmod(0o2777)
    with folder.claim(named(config)) as home:
        assert stat.S_IMODE(home.path.stat().st_mode) == 0o2700
    path.chmod(0o755)

    def chmod(path, mode):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", chmod)  # who runs tests as root may change every folder
    with pytest.raises(ConfigError, match=r"run\.id=mine cannot be private"):
        folder.claim(named(config)).__enter__()
    with folder.claim(named(config, shared=True)):
        pass
