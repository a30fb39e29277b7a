"""Collectives are read from a compiled program's text as XLA writes it, in every form of groups."""

import pytest

from launcher.plan import CompiledCollectives
from launcher.runtime.compiled_text import collectives_in

MESH = 2, 1, 4  # data, rows, model
MODEL_GROUPS = {
    "numbered": "replica_groups={{0,1,2,3},{4,5,6,7}}",
    "counted": "replica_groups=[2,4]<=[8]",
    "by axis": "replica_groups=mesh['a'=2,'b'=4] {'b'}",
    "by two axes": "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b','c'}",
    "by a part of an axis": "replica_groups=mesh['a'=8] {'a':(2)4}",
    "of turned devices": "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
}
DATA_GROUPS = {
    "numbered": "replica_groups={{0,4},{1,5},{2,6},{3,7}}",
    "counted": "replica_groups=[4,2]<=[2,4]T(1,0)",
    "by axis": "replica_groups=mesh['a'=2,'b'=4] {'a'}",
    "by a part of an axis": "replica_groups=mesh['a'=8] {'a':(1)2}",
}
BOTH = {"all": "replica_groups={}", "by axes": "replica_groups=mesh['a'=2,'b'=4] {'a','b'}"}
CASES = [
    (groups[form], axis, size)
    for groups, axis, size in (
        (MODEL_GROUPS, "model", 4),
        (DATA_GROUPS, "data", 2),
        (BOTH, "data and model", 8),
    )
    for form in groups
]


def program(*lines, more=""):
    body = "\n".join(f"  {line}" for line in lines)
    head = "HloModule jit_x, is_scheduled=true"
    return f"{head}\n\n{more}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"


@pytest.mark.parametrize(("groups", "axis", "size"), CASES)
def test_groups_tell_the_axis(groups, axis, size):
    text = program(f"ROOT %sum = bf16[16,8]{{1,0}} all-reduce(%p), {groups}, to_apply=%add")
    assert collectives_in(text, MESH) == (
        CompiledCollectives("all-reduce", axis, size, 1, 256, 256),
    )


WORK = {  # what stands between start and end, and whether the collective is exposed
    "nothing": ((), True),
    "what costs nothing": (("%b = f32[4]{0} bitcast(%p)",), True),
    "a number": (("%n = f32[] fusion(%p), kind=kLoop, calls=%f",), True),
    "another collective": (("%g = f32[9]{0} all-gather-done(%other)",), True),
    "a kernel": (("%k = f32[4]{0} fusion(%p), kind=kLoop, calls=%f",), False),
    "a library's kernel": (('%k = (f32[4]{0}, s8[64]{0}) custom-call(%p), target="gemm"',), False),
}


@pytest.mark.parametrize("case", WORK)
def test_exposed_is_what_nothing_runs_beside(case):
    between, exposed = WORK[case]
    text = program(
        "%sum = f32[4]{0} all-reduce-start(%p), replica_groups=[2,4]<=[8], to_apply=%add",
        *between,
        "ROOT %done = f32[4]{0} all-reduce-done(%sum)",
        "%late = f32[4]{0} fusion(%done), kind=kLoop, calls=%f",
    )
    (found,) = collectives_in(text, MESH)
    assert (found.count, found.bytes, found.exposed_bytes) == (1, 16, 16 * exposed)


def test_a_synchronous_one_is_exposed_whatever_stands_beside_it():
    text = program(
        "%sum = f32[4]{0} all-reduce-start(%p), replica_groups=[2,4]<=[8], "
        'backend_config={"collective_backend_config":{"is_sync":true}}',
        *WORK["a kernel"][0],
        "ROOT %done = f32[4]{0} all-reduce-done(%sum)",
    )
    assert [one.exposed_bytes for one in collectives_in(text, MESH)] == [16]


def test_bytes_are_those_of_whole_arrays():
    text = program(
        "%gather = ((bf16[4]{0}, f32[2]{0}), (bf16[16]{0}, f32[8]{0})) all-gather-start(%p, %q), "
        "replica_groups=[2,4]<=[8], dimensions={0}",
        "%gathered = (bf16[16]{0}, f32[8]{0}) all-gather-done(%gather)",
        "%scatter = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%p), replica_groups=[2,4]<=[8]",
        "%scattered = f32[2]{0} reduce-scatter-done(%scatter)",
        "ROOT %alone = f32[4]{0} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add",
    )
    found = {one.kind: one.bytes for one in collectives_in(text, MESH)}
    assert found == {"all-gather": 64, "reduce-scatter": 32}


def test_those_in_a_loop_count_once_for_each_turn():
    loop = """%body (p: f32[4]) -> f32[4] {
  ROOT %sum = f32[4]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
}

%other (p: f32[4]) -> f32[4] {
  ROOT %sum.1 = f32[4]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
}
"""
    turns = 'backend_config={"known_trip_count":{"n":"6"}}'
    text = program(
        f"%loop = f32[4]{{0}} while(%p), condition=%test, body=%body, {turns}",
        "%called = f32[4]{0} call(%p), to_apply=%other",
        "ROOT %either = f32[4]{0} conditional(%p), branch_computations={%other, %unknown}",
        more=loop,
    )
    (found,) = collectives_in(text, MESH)
    assert (found.count, found.bytes) == (8, 8 * 16)
