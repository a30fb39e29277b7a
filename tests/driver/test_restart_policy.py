"""When a run is started again, how often, and when it ends."""

import pytest

from launcher.driver.restart_policy import FailedError, Failure, GiveUp, Restart, decide, recovering


def failures(*pairs):
    return [Failure(cause, step) for cause, step in pairs]


def test_the_delay_doubles_up_to_a_minute():
    told = failures(*((f"worker_{i} died", 100 * i) for i in range(9)))
    delays = [decide(told[: n + 1], max_restarts=9) for n in range(9)]
    assert delays == [
        Restart(n + 1, s) for n, s in enumerate([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0])
    ]


@pytest.mark.parametrize("step", [6, 7, 8])
def test_the_same_failure_at_the_same_step_twice_in_a_row_is_the_last(step):
    verdict = decide(failures(("worker_0 died", 7), ("worker_0 died", step)), max_restarts=9)
    assert verdict == GiveUp(f"it failed in the same way twice in a row at step {step}")


@pytest.mark.parametrize(
    "told",
    [
        [("worker_0 died", 7), ("worker_0 died", 9)],  # at another step
        [("worker_0 died", 7), ("worker_1 died", 7)],  # another failure
        [("Ray ended", 7), ("worker_0 died", 7), ("Ray ended", 7)],  # not in a row
    ],
)
def test_other_failures_are_not_the_same(told):
    assert isinstance(decide(failures(*told), max_restarts=9), Restart)


def test_there_is_an_end_to_restarts():
    told = failures(*((f"worker_{i} died", i * 10) for i in range(3)))
    assert decide(told, max_restarts=3) == Restart(3, 4.0)
    assert decide(told, max_restarts=2) == GiveUp(
        "it was started again cluster.max_restarts=2 times"
    )
    assert decide(told[:1], max_restarts=0) == GiveUp("")


def run(outcomes, max_restarts=3, diagnose=lambda error: Failure(str(error), 1, f"{error}!")):
    """`recovering` over attempts that end with `outcomes`, errors or None; what was done."""
    done, remaining = [], iter(outcomes)

    def attempt():
        done.append("attempt")
        if (error := next(remaining)) is not None:
            raise error

    def begin_again(failure, restart):
        done.append((failure.cause, restart.number))

    recovering(attempt, diagnose, begin_again, lambda: max_restarts, done.append)
    return done


def test_a_run_is_tried_until_it_succeeds():
    outcomes = [OSError("a"), OSError("b"), None]
    assert run(outcomes) == ["attempt", ("a", 1), 1.0, "attempt", ("b", 2), 2.0, "attempt"]


def test_what_is_no_failure_ends_it_as_it_is():
    error = ValueError("the user's")
    with pytest.raises(ValueError, match="the user's") as raised:
        run([error], diagnose=lambda error: None)
    assert raised.value is error


def test_the_end_says_what_failed_and_why_it_is_the_end():
    with pytest.raises(FailedError) as raised:
        run([OSError("a"), OSError("a")])
    assert str(raised.value) == (
        "a!\nThe run is not started again: it failed in the same way twice in a row at step 1."
    )
    with pytest.raises(FailedError, match=r"^a!$"):
        run([OSError("a")], max_restarts=0)


def test_an_interrupt_is_not_recovered_from():
    with pytest.raises(KeyboardInterrupt):
        run([KeyboardInterrupt()])
