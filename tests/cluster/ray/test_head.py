"""How often the process that holds a node of Ray tries to bring Ray up."""

import itertools
from types import SimpleNamespace

import pytest

from launcher.cluster.ray import head


@pytest.mark.parametrize(
    ("seconds", "ups", "starts", "ended"),
    [
        (31, [False, True], 2, True),  # too slow once; later it ended by itself
        (31, [False] * 9, 3, True),
        (31, [False] * 9, 1, False),  # the driver has gone, while Ray runs
        (2, [False] * 9, 1, True),  # refused: another start would end alike
    ],
)
def test_ray_is_started_again_where_its_own_time_limit_ended_it(
    seconds, ups, starts, ended, monkeypatch
):
    clock, answers, begun = itertools.count(step=seconds), iter(ups), []
    monkeypatch.setattr(head.time, "monotonic", lambda: next(clock))
    ray = SimpleNamespace(poll=lambda: 1 if ended else None)
    monkeypatch.setattr(head, "start_ray", lambda given: begun.append(given) or ray)
    monkeypatch.setattr(head, "watch", lambda given, ray: next(answers))
    monkeypatch.setattr(head, "end_everything", lambda: None)
    assert head.run_ray(None) is ended
    assert len(begun) == starts
