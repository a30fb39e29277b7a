"""A damaged checkpoint is recognised whatever the damage, reported in a line, and passed over."""

import hashlib
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from launcher import checkpoint
from launcher.checkpoint import layout
from launcher.checkpoint.train_state import TrainState
from launcher.config.compose import load, to_dict
from launcher.config.errors import ConfigError
from launcher.driver.folder import folder
from launcher.driver.planning.init_from import check_start, find_start
from launcher.recipes import InputError

FLIPS = 80


def state():
    params = {"w": jnp.arange(600.0).reshape(20, 30), "b": jnp.ones(3)}
    return TrainState(jnp.int32(3), params, {"mu": params}, jnp.zeros(2, jnp.uint32))


def positions(step):
    return {"data": {"next_batch": step}, "metrics": {"next_step": step + 1}}


@pytest.fixture(scope="module")
def settings():
    return load(["model=mlp", "dataset=synthetic", "run.id=mine"])


@pytest.fixture
def config(settings, tmp_path):
    return replace(settings, run=replace(settings.run, dir=f"{tmp_path}/outputs"))


@pytest.fixture(scope="module")
def saved(settings, tmp_path_factory):
    """Two checkpoints of the run, after 3 and after 6 steps."""
    path = tmp_path_factory.mktemp("saved")
    for step in (3, 6):
        metadata = {"config": to_dict(settings), **positions(step)}
        checkpoint.save(path, step, checkpoint.copy_to_host(state()), metadata)
    return path


@pytest.fixture
def checkpoints(config, saved):
    """A copy of them, where the run looks for its own."""
    path = Path(config.run.dir, "mine", "checkpoints")
    shutil.copytree(saved, path)
    return path


def damages(root):
    """Ways to damage the checkpoint `root`: (file, its new contents, None to delete it)."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    draw = random.Random(0)
    for path in files:
        whole = path.read_bytes()
        yield path, None
        for size in {0, 1, len(whole) // 2, len(whole) - 1}:
            yield path, whole[:size]
        yield path, whole + b"\0"
    sizes = [path.stat().st_size for path in files]
    for k in range(FLIPS):
        # Half of them anywhere, half in each file in turn: most bytes are in few files.
        path = draw.choices(files, sizes)[0] if k % 2 else files[k // 2 % len(files)]
        changed = bytearray(path.read_bytes())
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        yield path, bytes(changed)


def test_any_damage_is_recognised_and_the_newest_whole_one_is_taken(config, checkpoints):
    root, cases = checkpoints / "6", 0
    for path, contents in list(damages(root)):
        before = path.read_bytes()
        path.unlink() if contents is None else path.write_bytes(contents)
        assert folder.check(config) in (3, 6)  # it may not read all; no traceback
        with folder.claim(config) as home:
            assert home.finished_steps == 3, (path, contents)
            (line,) = home.damaged
        assert line.startswith(f"checkpoint {root} is damaged and not used: ")
        assert line.endswith("; it is kept as 6.damaged")
        assert path.name in line
        assert "\n" not in line
        (checkpoints / "6.damaged").rename(root)
        path.write_bytes(before)
        cases += 1
    assert cases >= FLIPS
    with folder.claim(config) as home:
        assert (home.finished_steps, home.damaged) == (6, ())


def test_where_none_is_whole_the_run_is_refused(config, checkpoints):
    for step in (3, 6):
        (checkpoints / str(step) / "checksums.json").unlink()
    for resume in ("auto", "must"):
        asked = replace(config, run=replace(config.run, resume=resume))
        with pytest.raises(ConfigError) as error:
            folder.check(asked)
        assert str(error.value) == (
            f"run.id=mine cannot be resumed: no checkpoint in {checkpoints} is intact (in 6, "
            "checksums.json is missing). Put back a copy of one, or choose another run.id; to "
            "start afresh, remove them all."
        )


def test_a_complete_run_is_read_before_it_is_called_complete(config, checkpoints):
    asked = replace(config, train=replace(config.train, steps=6))
    assert folder.check(asked) == 6
    (data,) = (checkpoints / "6" / "default" / "d").iterdir()
    data.write_bytes(bytes(data.stat().st_size))
    assert folder.check(asked) == 3


def test_what_a_save_that_was_cut_off_left_is_cleared(config, checkpoints):
    (checkpoints / "9.partial-ab" / "default").mkdir(parents=True)
    with folder.claim(config) as home:
        assert home.finished_steps == 6
    assert sorted(path.name for path in checkpoints.iterdir()) == ["3", "6"]


@pytest.mark.parametrize("named", ["", "checkpoints", "checkpoints/6"])
def test_a_run_starts_from_a_run_its_checkpoints_or_one_of_them(named, config, checkpoints, caplog):
    path = checkpoints.parent / named
    asked = replace(config, train=replace(config.train, init_from=str(path)))
    caplog.set_level("INFO", "launcher")
    assert find_start(asked, 0) == checkpoints / "6"
    assert caplog.messages == [f"parameters from {checkpoints / '6'}"]
    assert find_start(asked, 4) is None
    assert caplog.messages[1:] == [
        "train.init_from is not used: run mine resumes from its own step 4"
    ]


def test_what_nothing_can_start_from_is_named(config, checkpoints, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.rmtree(checkpoints / "3")
    (checkpoints / "6" / "default" / "_METADATA").unlink()
    damaged = "default/_METADATA is missing"
    for path, told in {
        tmp_path / "none": "does not exist",
        tmp_path / ("a" * 300): "cannot be read (File name too long)",
        tmp_path / "empty": "holds no checkpoint",
        checkpoints / "6" / "checksums.json": "cannot be used: it is not an .npz file",
        checkpoints / "6": f"is damaged: {damaged}",
        checkpoints: f"holds no intact checkpoint; in 6, {damaged}",
    }.items():
        asked = replace(config, train=replace(config.train, init_from=str(path)))
        with pytest.raises(ConfigError) as error:
            find_start(asked, 0)
        assert str(error.value).startswith(f"train.init_from={path} {told}")
        assert error.value.keys == ("train.init_from",)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"w": (20, 31), "b": (3,)}, "params.w is (20, 30) there and (20, 31) in the model"),
        ({"w": (20, 30)}, "it has params.b, which the model does not have"),
        ({"w": (20, 30), "b": (3,), "c": (1,)}, "it has no params.c, which the model has"),
    ],
)
def test_parameters_of_another_model_are_refused_by_name(checkpoints, params, told):
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    with pytest.raises(ConfigError) as error:
        check_start("there", checkpoints / "6", {"params": like})
    assert str(error.value).startswith(f"train.init_from=there does not fit the model: {told}. ")
    good = {"w": (20, 30), "b": (3,)}
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in good.items()}
    check_start("there", checkpoints / "6", {"params": like})


def test_a_state_of_another_shape_is_refused_by_name(checkpoints):
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state())
    like.params["w"] = jax.ShapeDtypeStruct((20, 31), jnp.float32, sharding=where)
    told = rf"cannot resume from {checkpoints / '6'}: params.w is \(20, 30\) there and \(20, 31\)"
    with pytest.raises(InputError, match=told):
        checkpoint.restore(checkpoints, 6, like)


def copy(source, target):
    shutil.copytree(source, target)


def move(source, target):
    source.rename(target)


@pytest.mark.parametrize(("how", "steps"), [(copy, 30), (copy, 15), (move, 30), (move, 15)])
def test_a_checkpoint_under_another_steps_name_is_not_taken_for_that_steps(
    how, steps, config, checkpoints
):
    how(checkpoints / "6", checkpoints / "15")
    asked = replace(config, train=replace(config.train, steps=steps))
    finished = 6 if how is copy else 3
    assert folder.check(asked) == finished  # also where the run would be complete
    with folder.claim(asked) as home:
        assert home.finished_steps == finished
        (line,) = home.damaged
    assert line == (
        f"checkpoint {checkpoints}/15 is damaged and not used: checksums.json is of step 6; the "
        "folder was renamed or copied; it is kept as 15.damaged"
    )


def test_a_checkpoint_in_another_ones_place_is_not_taken_for_it(config, checkpoints):
    shutil.rmtree(checkpoints / "6")
    copy(checkpoints / "3", checkpoints / "6")
    asked = replace(config, train=replace(config.train, init_from=str(checkpoints / "6")))
    with pytest.raises(ConfigError, match=r"is damaged: checksums\.json is of step 3; the folder"):
        find_start(asked, 0)
    with folder.claim(config) as home:
        assert home.finished_steps == 3


def test_a_checkpoint_of_another_run_is_not_taken_for_this_ones(config, checkpoints):
    other = replace(config, run=replace(config.run, id="other"))
    copy(checkpoints.parent, checkpoints.parents[1] / "other")
    with pytest.raises(ConfigError) as error:
        folder.check(other)
    assert "in 6, _CHECKPOINT_METADATA is of run 'mine'; a folder was renamed or copied" in str(
        error.value
    )
    named = replace(config.train, init_from=str(checkpoints.parents[1] / "other"))
    assert find_start(replace(other, train=named), 0).name == "6"  # which may be any run's


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data": {"next_batch": -1}}, "continues at batch -1"),
        ({"data": {"next_batch": True}}, "continues at batch True"),
        ({"data": []}, "is not a run's"),
        ({"metrics": {"next_step": 4}}, "continues at step 4, not 7"),
        ({"config": {"run": {"id": 7}}}, "names no run"),
        ({"config": None}, "is not a run's"),
    ],
)
def test_an_account_that_cannot_be_is_named(change, told, config, checkpoints):
    """Sealed as if it had been written so."""
    metadata = {"config": to_dict(config), **positions(6), **change}
    checkpoint.save(checkpoints, 6, checkpoint.copy_to_host(state()), metadata)
    with folder.claim(config) as home:
        assert home.finished_steps == 3
        (line,) = home.damaged
    assert f"not used: _CHECKPOINT_METADATA {told};" in line


def test_what_lies_outside_of_a_checkpoint_is_no_part_of_it(checkpoints):
    root, outside = checkpoints / "6", checkpoints.parent / "secret"
    outside.write_text("not to be read")
    (root / "link").symlink_to(outside)
    _, sums = layout._read(root / "checksums.json")
    sum_ = (outside.stat().st_size, hashlib.sha256(outside.read_bytes()).hexdigest())
    for name in (str(outside), "../../secret", "link"):
        layout.write_checksums(root, 6, {**sums, name: sum_})
        assert layout.damage(root) == f"checksums.json names {name}, which is not below it"
    (checkpoints / "link").symlink_to(checkpoints / "3")  # of the whole, a link is fine
    assert layout.damage(checkpoints / "link") is None


def test_what_stands_in_a_checkpoints_place_or_a_locks_is_not_waited_for(config, checkpoints):
    for path in (checkpoints / "6" / "checksums.json", checkpoints / "6" / "_CHECKPOINT_METADATA"):
        path.unlink()
        os.mkfifo(path)
    os.mkfifo(checkpoints.parent / ".lock")
    with folder.claim(config) as home:
        assert home.finished_steps == 3
