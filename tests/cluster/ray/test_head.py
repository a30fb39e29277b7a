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
        (2, [False] * 9, 1, True),  # refused: another start would end alike
    ],
)
def test_ray_is_started_again_where_its_own_time_limit_ended_it(
    seconds, ups, starts, ended, monkeypatch
):
    clock, answers, begun = itertools.count(step=seconds), iter(ups), []
    monkeypatch.setattr(head.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(head, "start_ray", lambda given: begun.append(given) or Ended)
    monkeypatch.setattr(head, "watch", lambda given, ray: next(answers))
    monkeypatch.setattr(head, "end_everything", lambda: None)
    assert head.run_ray(None) is ended
    assert len(begun) == starts


def test_ray_is_not_started_again_for_a_driver_that_has_gone(monkeypatch):
    begun = []
    running = SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(head, "start_ray", lambda given: begun.append(given) or running)
    monkeypatch.setattr(head, "watch", lambda given, ray: False)
    assert head.run_ray(None) is False
    assert len(begun) == 1


Ended = SimpleNamespace(poll=lambda: 1)
